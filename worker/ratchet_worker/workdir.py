"""The current directory of a job's ranks: a writable copy of the code snapshot, made once and kept over all attempts.

What a script writes relative to its current directory, its own checkpoints among it, is there for the next attempt. The code
itself is imported from the snapshot, which nobody can change. Beside it lies what the copy was made of, file by file: where the
job goes on with other code, what nobody has changed since is replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from ratchet_contract import code_tree
from ratchet_contract.code_tree import Entry
from ratchet_contract.paths import JobPaths
from ratchet_worker import procs
from ratchet_worker.files import write_atomic

_PREFIX: Final = ".work-"
_OTHER: Final = "other"
"""Of what is neither a file nor a link, or lies behind a link: no file of the code, whatever else it is."""


@dataclass(frozen=True)
class CopiedCode:
    """``work.json``: the digest of the code that the directory has a copy of, and for each of its files what was copied.

    ``begun``: what an update that was cut short may have made of a file since (None: removed it). ``left``: files of the code
    that were not copied, since the job had some of its own there."""

    digest: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    begun: dict[str, list[str | None]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def forms(self, path: str) -> set[str | None]:
        """Of a file that nobody but updates has changed."""
        return {self.files.get(path), *self.begun.get(path, ())}


def prepare(code: Path | None, work: Path, digest: str | None = None) -> list[str]:
    """Make ``work`` unless it is there: a copy of ``code``, or empty. Raises ``OSError``.

    Copied under another name beside it, synced and renamed, so a copy that a crash cut short is never used; the next call
    removes it. One process at a time on each disk: node 0's agent before the others go on, each under its attempt's lock.
    ``digest``: of ``code``. Where the copy was made of other code, it is brought up to date; returned are the paths of its files
    that are left as they are, since they are not what was copied. One of these that is gone by the next call is copied then.
    """
    if work.is_dir():
        return [] if code is None else _update(code, work, digest)
    _clear(work)
    copy = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=work.parent))
    try:
        copy.chmod(0o755)
        if code is not None:
            found = _entries(code)
            _copy(found, copy)
            _record(work, CopiedCode(digest=digest, files=_forms(found)))
        _sync(copy)
        copy.rename(work)
    except BaseException as error:
        procs.remove_tree(copy)
        if isinstance(error, OSError) and work.is_dir():  # another node's agent was quicker
            return []
        raise
    _sync(work.parent)
    return []


def _entries(code: Path) -> list[Entry]:
    """What a snapshot of ``code`` holds, or is."""
    return code_tree.entries(code, code_tree.UNLIMITED)


def _clear(work: Path) -> None:
    for left in work.parent.glob(f"{_PREFIX}*"):
        if left.is_dir() and not left.is_symlink():
            procs.remove_tree(left)
        else:
            left.unlink()


def _update(code: Path, work: Path, digest: str | None) -> list[str]:
    """Again after a crash, and with whatever code, it comes to the same end: what may be copied is recorded before, and what was
    copied last."""
    copied = _recorded(work)
    same = copied.digest == digest
    if digest is None or (same and all(_form_in(work, path) is not None for path in copied.left)):
        return []
    _clear(work)
    found = _entries(code)
    files = _forms(found)
    ours = copied.files.keys() | copied.begun.keys()
    begun = {path: [*copied.begun.get(path, ()), files.get(path)] for path in ours | files.keys()}
    _record(work, replace(copied, begun=begun))
    for path in sorted(ours - files.keys(), reverse=True):  # a file may make room for a directory
        here = _form_in(work, path)
        if here is not None and here in copied.forms(path):
            (work / path).unlink()
            with suppress(OSError):  # not empty
                for folder in list((work / path).parents)[: path.count("/")]:
                    folder.rmdir()
    left = []
    for entry in found:
        path, here = entry.path, _form_in(work, entry.path)
        known = copied.forms(path)
        if here == files[path] or (files[path] == copied.files.get(path) and here not in known):
            continue
        if here is None or here in known:
            _put(entry, work)
        else:
            left.append(path)
            del files[path]
    _record(work, CopiedCode(digest=digest, files=files, left=left))
    return [] if same else left


def _put(entry: Entry, work: Path) -> None:
    place = work / entry.path
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=work.parent))
    try:
        _place(entry, made / "file")
        (made / "file").replace(place)
    finally:
        procs.remove_tree(made)
    _sync(place.parent)


def _forms(found: list[Entry]) -> dict[str, str]:
    """By path."""
    return {entry.path: _form(entry.source) for entry in found}


def _form(path: Path) -> str:
    """A file's content and whether it can be executed, or a link's target."""
    if path.is_symlink():
        return f"link {path.readlink()}"
    if not path.is_file():
        return _OTHER
    inner = hashlib.sha256()
    for chunk in code_tree.chunks(path):
        inner.update(chunk)
    return f"{'x' if path.stat().st_mode & 0o111 else '-'} {inner.hexdigest()}"


def _form_in(work: Path, path: str) -> str | None:
    """The same of a file in the working directory, in which user code may have put anything; None: nothing is there."""
    place = work / path
    folders = list(place.parents)[: path.count("/")]
    if any(folder.is_symlink() or (folder.exists() and not folder.is_dir()) for folder in folders):
        return _OTHER
    if not os.path.lexists(place):
        return None
    try:
        return _form(place)
    except OSError:  # user code has kept it from the agent
        return _OTHER


def _recorded(work: Path) -> CopiedCode:
    try:
        told = json.loads(JobPaths(work.parent).work_file.read_bytes())
        return CopiedCode(
            None if told["digest"] is None else str(told["digest"]),
            {str(path): str(form) for path, form in told["files"].items()},
            {
                str(path): [None if form is None else str(form) for form in forms]
                for path, forms in told["begun"].items()
            },
            [str(path) for path in told["left"]],
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return CopiedCode()


def _record(work: Path, copied: CopiedCode) -> None:
    text = json.dumps(asdict(copied))  # in ASCII, since a name need not be text
    write_atomic(JobPaths(work.parent).work_file, text.encode(), durable=True)


def _copy(found: list[Entry], target: Path) -> None:
    """Whoever owns the copy may write all of it."""
    folders = {target}
    for entry in found:
        place = target / entry.path
        place.parent.mkdir(parents=True, exist_ok=True)
        folders.update(p for p in place.parents if p.is_relative_to(target))
        _place(entry, place)
    for folder in folders:
        folder.chmod(0o755)
        _sync(folder)


def _place(entry: Entry, place: Path) -> None:
    if entry.link is not None:
        place.symlink_to(entry.link)
        return
    shutil.copyfile(entry.source, place)
    place.chmod(0o755 if entry.executable else 0o644)
    _sync(place)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
