"""Which files of a user's directory a snapshot takes: all but those that ``.gitignore`` and ``.ratchetignore`` name.

The files hold for their own directory and all below, as git has it: the last pattern that fits decides, in the deepest directory
that has one, and what lies in a directory that is left out stays out. Of one directory ``.ratchetignore`` is read after
``.gitignore``. Those above the user's directory hold, too, up to the one that has ``.git``, of the same owner; without one, or
where they leave out the user's directory itself, none above does. ``code.include`` of a spec names files and directories that are
taken all the same. What was copied is read by ``code_tree.entries``, which leaves nothing more out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from ratchet_contract.code_tree import Entry, Limits, TreeError, walk, within_limits
from ratchet_contract.plural import first_of

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILES: Final = (".gitignore", ".ratchetignore")
LARGE: Final = 32 << 20
"""Bytes from which on a file is worth a word."""
_MAX_BYTES: Final = 64 << 10
_MAX_STARS: Final = 3
"""Within one part of a pattern: with more of them a name may take minutes to be compared."""
_MOST_NAMES: Final = 100_000
"""Looked at for one snapshot: names in a directory that is left out as a whole do not count, files left out one by one do."""


Allowed = Callable[[Path], bool]
"""Of a real path: may it be read?"""


def anything(_: Path) -> bool:
    return True


@dataclass(frozen=True)
class Choice:
    """``left_out``: what ignore files leave out, a directory with a ``/`` behind it and for all below."""

    entries: list[Entry]
    left_out: list[str]

    def leaves_out(self, path: str) -> bool:
        return any(_at_or_below(path, name.rstrip("/")) for name in self.left_out)

    def notes(self) -> list[tuple[str, str]]:
        """What a submitter is to be told: a code and a sentence of each."""
        out = []
        if self.left_out:
            text = (
                f"the snapshot of the code leaves out what {' and '.join(IGNORE_FILES)} name: {first_of(self.left_out)}"
            )
            text += ". code.include brings a file or directory back"
            if any(name.endswith("/") for name in self.left_out):
                text += "; a directory that the job writes to is not there when it starts: have the code make it (os.makedirs)"
            out.append(("code-left-out", text))
        large = sorted((e for e in self.entries if e.size >= LARGE), key=lambda e: -e.size)
        if large:
            named = first_of([f"{e.path} ({e.size >> 20} MiB)" for e in large])
            text = (
                f"the snapshot of the code has large files: {named}. Keep data elsewhere, or name it in .ratchetignore"
            )
            out.append(("code-large-files", text))
        return out


def chosen(root: Path) -> Iterator[Entry]:
    """What a snapshot of ``root`` would take, as it is found and without limits. Raises ``TreeError``."""
    return walk(root.resolve(), _Rules(root.resolve(), []).keeps)


def choose(root: Path, include: Sequence[str] = (), limits: Limits = Limits(), allowed: Allowed = anything) -> Choice:
    """``allowed``: may the repository above ``root`` be looked at? Raises ``TreeError``: those of ``code_tree.entries``,
    ``ignore-file`` and ``include-not-found``."""
    rules = _Rules(root.resolve(), [str(PurePosixPath(name)) for name in include], allowed)
    found = within_limits(root, walk(root.resolve(), rules.keeps), limits)
    for name in rules.include:
        if not any(_at_or_below(entry.path, name) for entry in found):
            raise TreeError(
                "include-not-found",
                f"code.include names {name!r}, and a snapshot of {str(root)!r} has no such file: it is not there, or a "
                "cache, version control, a virtual environment or checkpoints, which no snapshot has",
            )
    return Choice(found, sorted(rules.left_out))


class _Rules:
    def __init__(self, root: Path, include: list[str], allowed: Allowed = anything) -> None:
        self.include, self.left_out = include, list[str]()
        self._root, self._above = _repository(root, allowed), ""
        self._specs: dict[str, GitIgnoreSpec | None] = {}
        self._looked_at = 0
        self._closed: set[str] = set()
        """Directories that are left out and looked into for what is included."""
        for part in root.relative_to(self._root).parts:
            if self._ignored(part, is_dir=True):  # and is wanted all the same
                self._root, self._above, self._specs = root, "", {}
                break
            self._above += f"{part}/"

    def keeps(self, path: str, is_dir: bool) -> bool:
        """A file: is it taken? A directory: is it looked into? Raises ``TreeError`` (``too-large``)."""
        self._looked_at += 1
        if self._looked_at > _MOST_NAMES:
            raise TreeError(
                "too-large",
                f"the directory of the code has more than {_MOST_NAMES} names, with those that are left out one by one (as "
                f"{path!r}): leave out a directory of many files as a whole, by a line like data/ in .ratchetignore",
            )
        if any(_at_or_below(path, name) for name in self.include):
            return True
        parent = path.rpartition("/")[0]
        wanted_below = is_dir and any(_at_or_below(name, path) for name in self.include)
        if parent not in self._closed and not self._ignored(path, is_dir):
            return True
        if parent not in self._closed:
            self.left_out.append(path + "/" * is_dir)
        if wanted_below:
            self._closed.add(path)
        return wanted_below

    def _ignored(self, path: str, is_dir: bool) -> bool:
        path = folder = self._above + path
        while folder:
            folder = folder.rpartition("/")[0]
            spec = self._spec(folder)
            below = path[len(folder) + 1 :] if folder else path
            if spec is not None and (said := spec.check_file(below + "/" * is_dir).include) is not None:
                return said
        return False

    def _spec(self, folder: str) -> GitIgnoreSpec | None:
        if folder not in self._specs:
            lines = [line for name in IGNORE_FILES for line in _lines(self._root / folder / name)]
            self._specs[folder] = _compiled(lines) if lines else None
        return self._specs[folder]


def _repository(root: Path, allowed: Allowed) -> Path:
    """The directory at or above ``root`` that has ``.git``, which must be its owner's; else ``root``."""
    for folder in (root, *root.parents):
        try:
            same = (folder / ".git").lstat().st_uid == root.stat().st_uid
        except OSError:  # there is none
            continue
        return folder if same and allowed(folder) else root
    return root


def _compiled(lines: list[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(lines)


def _lines(path: Path) -> list[str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # none, or a link, which git does not follow either
        return []
    with os.fdopen(fd, "rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise TreeError("ignore-file", f"{str(path)!r} is longer than {_MAX_BYTES >> 10} KiB")
    lines = [line.removesuffix("\r") for line in content.decode("utf-8", "surrogateescape").split("\n")]
    for number, line in enumerate(lines, 1):
        pattern = "" if line.startswith("#") else line
        if pattern.count("**") > _MAX_STARS or any(p.count("*") > _MAX_STARS for p in pattern.split("/")):
            raise TreeError(
                "ignore-file",
                f"{str(path)!r}, line {number}: {line!r} has more than {_MAX_STARS} stars in a part, or ** in all, and may take "
                "minutes to be compared: write it with fewer, or remove it",
            )
    return [line for line in lines if _is_valid(line)]  # git ignores others, too


def _is_valid(pattern: str) -> bool:
    try:
        _compiled([pattern])
    except ValueError:
        return False
    return True


def _at_or_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
