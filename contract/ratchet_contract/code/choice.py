"""Chooses the files of a user's directory that a snapshot includes. These are the files that count as code (``code.tree``) and
that no ``.gitignore`` or ``.ratchetignore`` names. Patterns match as in git. In a trusted git repository, the ignore files in
directories above the user's directory count too, unless they ignore that directory itself. ``code.include`` of a spec names
ignored files and directories that are included nevertheless."""

from __future__ import annotations

import codecs
import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from ratchet_contract.code.tree import Entry, Limits, TreeError, walk, within_limits
from ratchet_contract.plural import join_first

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILES: Final = (".gitignore", ".ratchetignore")
LARGE: Final = 32 << 20
"""Bytes from which on a file is reported as large."""
_MAX_BYTES: Final = 64 << 10
_MAX_STARS: Final = 3
"""Within one part of a pattern: with more stars, matching one name may take minutes."""
_MAX_NAMES: Final = 100_000
"""Examined for one snapshot: names in a directory that is ignored as a whole do not count, files ignored one by one do."""
_CLASSES: Final = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": " \t", "cntrl": "\x01-\x1f\x7f", "digit": "0-9", "graph": '"-.0-~!',
    "lower": "a-z", "print": " -.0-~", "punct": '"-.:-@[-`{-~!', "space": " \t\r", "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}  # fmt: skip
"""The ASCII characters of each class in git. None begins with a !, which would negate the bracket, or contains a slash."""


Allowed = Callable[[Path], bool]
"""True if the real path may be read."""


def allow_all(_: Path) -> bool:
    """Return True for every path."""
    return True


@dataclass(frozen=True)
class Choice:
    """The result of ``choose``. ``left_out``: ignored files, and ignored directories with a ``/`` at the end."""

    entries: list[Entry]
    left_out: list[str]

    def is_left_out(self, path: str) -> bool:
        """Return True if the file ``path`` is ignored, and ``include`` does not add it to the snapshot."""
        return all(entry.path != path for entry in self.entries) and any(
            _at_or_below(path, name.rstrip("/")) for name in self.left_out
        )

    def notes(self) -> list[tuple[str, str]]:
        """Return notes on ignored and on large files for the user, each as a code and a sentence."""
        out = []
        if self.left_out:
            text = f"the snapshot of the code excludes files named in {' and '.join(IGNORE_FILES)}: {join_first(self.left_out)}"
            text += ". code.include includes a file or directory again"
            if any(name.endswith("/") for name in self.left_out):
                text += (
                    "; an excluded directory that the job writes to does not exist when it starts: create it in the code "
                    "(os.makedirs)"
                )
            out.append(("code-left-out", text))
        large = sorted((e for e in self.entries if e.size >= LARGE), key=lambda e: -e.size)
        if large:
            named = join_first([f"{e.path} ({e.size >> 20} MiB)" for e in large])
            text = (
                f"the snapshot of the code has large files: {named}. Keep data elsewhere, or name it in .ratchetignore"
            )
            out.append(("code-large-files", text))
        return out


def iter_chosen(root: Path) -> Iterator[Entry]:
    """Yield the entries that a snapshot of ``root`` without ``code.include`` and limits would have, unsorted. Raises
    ``TreeError``, at the call or while iterating."""
    return walk(root.resolve(), _Rules(root.resolve(), []).is_included)


def choose(
    root: Path, include: Sequence[str] = (), limits: Limits = Limits(), is_allowed: Allowed = allow_all
) -> Choice:
    """Return the files of ``root`` that a snapshot includes, and the ignored paths. ``include``: ignored paths that are included
    nevertheless. ``is_allowed``: False for a directory that must not serve as the git repository. Raises ``TreeError``, also if a
    path of ``include`` matches no file."""
    rules = _Rules(root.resolve(), [str(PurePosixPath(name)) for name in include], is_allowed)
    found = within_limits(root, walk(root.resolve(), rules.is_included), limits)
    for name in rules.include:
        if not any(_at_or_below(entry.path, name) for entry in found):
            raise TreeError(
                "include-not-found",
                f"code.include names {name!r}, and a snapshot of {str(root)!r} has no such file: it does not exist, or is a "
                "cache, version control, a virtual environment or checkpoints, which are never in a snapshot",
            )
    return Choice(found, sorted(rules.left_out))


class _Rules:
    """The ignore rules for the directory ``root``. ``include``: ignored paths that are included nevertheless. ``left_out``:
    ignored paths seen so far."""

    def __init__(self, root: Path, include: list[str], is_allowed: Allowed = allow_all) -> None:
        self.include, self.left_out = include, list[str]()
        self._root, self._prefix = _repository(root, is_allowed), ""
        self._specs: dict[str, GitIgnoreSpec | None] = {}
        self._examined_count = 0
        self._partly_ignored: set[str] = set()
        """Directories that are ignored, but searched for included paths."""
        for part in root.relative_to(self._root).parts:
            if self._is_ignored(part, is_dir=True):  # but is wanted nevertheless
                self._root, self._prefix, self._specs = root, "", {}
                break
            self._prefix += f"{part}/"

    def is_included(self, path: str, is_dir: bool) -> bool:
        """Return True if the file ``path`` is in the snapshot, or if the directory ``path`` must be searched. Records ignored
        paths in ``left_out``. Called for a directory before its content. Raises ``TreeError``."""
        self._examined_count += 1
        if self._examined_count > _MAX_NAMES:
            raise TreeError(
                "too-large",
                f"the directory of the code has more than {_MAX_NAMES} names, including those that are excluded one by one "
                f"(as {path!r}): exclude a directory of many files as a whole, with a line like data/ in .ratchetignore",
            )
        if any(_at_or_below(path, name) for name in self.include):
            return True
        parent = path.rpartition("/")[0]
        wanted_below = is_dir and any(_at_or_below(name, path) for name in self.include)
        if parent not in self._partly_ignored and not self._is_ignored(path, is_dir):
            return True
        if parent not in self._partly_ignored:
            self.left_out.append(path + "/" * is_dir)
        if wanted_below:
            self._partly_ignored.add(path)
        return wanted_below

    def _is_ignored(self, path: str, is_dir: bool) -> bool:
        """True if the last matching pattern, in the deepest directory that has one, ignores the path."""
        path = folder = self._prefix + path
        while folder:
            folder = folder.rpartition("/")[0]
            spec = self._spec(folder)
            below = path[len(folder) + 1 :] if folder else path
            if spec is not None and (said := spec.check_file(below + "/" * is_dir).include) is not None:
                return said
        return False

    def _spec(self, folder: str) -> GitIgnoreSpec | None:
        """Return the patterns of one directory; None if it has none. Each directory is read once."""
        if folder not in self._specs:
            lines = [line for name in IGNORE_FILES for line in _read_patterns(self._root / folder / name)]
            self._specs[folder] = _compile_patterns(lines) if lines else None
        return self._specs[folder]


def _repository(root: Path, is_allowed: Allowed) -> Path:
    """Return the nearest directory at or above ``root`` with ``.git``; ``root`` if there is none, ``.git`` has another owner than
    ``root``, or ``is_allowed`` is False for it."""
    for folder in (root, *root.parents):
        try:
            same = (folder / ".git").lstat().st_uid == root.stat().st_uid
        except OSError:  # there is none
            continue
        return folder if same and is_allowed(folder) else root
    return root


def _compile_patterns(lines: list[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(lines)


def _read_patterns(path: Path) -> list[str]:
    """Return the valid lines of an ignore file; empty if there is none or it is a link. Raises ``TreeError`` if it cannot be
    read, is too long, or has a pattern with too many stars."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return []  # none, or a link, which git does not follow either
        raise TreeError("ignore-file", f"{str(path)!r} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise TreeError("ignore-file", f"{str(path)!r} is longer than {_MAX_BYTES >> 10} KiB")
    text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    for number, line in enumerate(lines, 1):
        pattern = "" if line.startswith("#") else line
        if pattern.count("**") > _MAX_STARS or any(p.count("*") > _MAX_STARS for p in pattern.split("/")):
            raise TreeError(
                "ignore-file",
                f"{str(path)!r}, line {number}: {line!r} has more than {_MAX_STARS} stars in a part, or ** in all, and may take "
                "minutes to be compared: write it with fewer, or remove it",
            )
    return [line for line in map(_with_ranges, lines) if _is_valid(line)]  # git ignores invalid ones too


def _with_ranges(pattern: str) -> str:
    """Return the pattern with each class of characters, like ``[:digit:]``, as ranges, since pathspec knows only these."""

    def expand(bracket: re.Match[str]) -> str:
        return re.sub(r"\[:([a-z]+):\]", lambda name: _CLASSES.get(name[1], name[0]), bracket[0])

    return re.sub(r"(?<=(?<!\\)\[)[!^]?(?:[^][\\]|\[:[a-z]+:\])+(?=\])", expand, pattern)


def _is_valid(pattern: str) -> bool:
    """True if the pattern can be compiled."""
    try:
        _compile_patterns([pattern])
    except ValueError:
        return False
    return True


def _at_or_below(path: str, folder: str) -> bool:
    """True if ``path`` is ``folder`` or is below it."""
    return path == folder or path.startswith(f"{folder}/")
