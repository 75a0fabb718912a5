"""The working directory of a job's ranks: a writable copy of the code, kept over all attempts. If the job gets other code,
files that the job has not changed are replaced. Modules are imported from the code itself, not from this copy."""

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

from ratchet_contract.atomic_write import fsync_path, write_atomic
from ratchet_contract.code import tree
from ratchet_contract.code.tree import Entry
from ratchet_contract.paths import JobPaths

_OTHER: Final = "other"
"""The form of a path that is neither a file nor a link, is unreadable, or lies below a link or a file: it is not replaced."""


@dataclass(frozen=True)
class CopiedCode:
    """The content of ``work.json``. ``digest``: digest of the copied code. ``files``: by path, the form of each copied file,
    which is text on its content and type (``_form``). ``begun``: forms that an interrupted update may have made. ``left``:
    files that were not copied, since the job had its own version of them."""

    digest: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    begun: dict[str, list[str | None]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def forms(self, path: str) -> set[str | None]:
        """The forms that ``path`` may have if only updates have changed it; None among them stands for a missing file."""
        return {self.files.get(path), *self.begun.get(path, ())}


def prepare(code: Path | None, work: Path, digest: str | None = None, *, node: int = 0) -> list[str]:
    """Create ``work`` as a copy of ``code``, or update ``work`` if it exists. ``code`` None: ``work`` is created empty, and
    never updated. ``digest``: the code's digest; usually an update is only made if it has changed; None: no update. ``node``:
    number of the caller's node, since other nodes that share the disk may do the same at this time. Returns the files that an
    update to other code did not replace, because the job has changed them. Raises ``OSError`` or ``TreeError``."""
    prefix = f".work-{node}-"
    if work.is_dir():
        return [] if code is None else _update(code, work, digest, prefix)
    _remove_leftovers(work, prefix)
    copy = Path(tempfile.mkdtemp(prefix=prefix, dir=work.parent))
    try:
        copy.chmod(0o755)
        if code is not None:
            found = _entries(code)
            _copy(found, copy)
            _write_record(work, CopiedCode(digest=digest, files=_forms(found)))
        fsync_path(copy)
        copy.rename(work)
    except BaseException as error:
        shutil.rmtree(copy, ignore_errors=True)
        if isinstance(error, OSError) and work.is_dir():  # another node's agent created it first
            return []
        raise
    fsync_path(work.parent)
    return []


def _entries(code: Path) -> list[Entry]:
    """Return the entries of the directory ``code`` that count as code, without limits of size and number. Raises
    ``TreeError``."""
    return tree.list_entries(code, tree.UNLIMITED)


def _remove_leftovers(work: Path, prefix: str) -> None:
    """Delete the incomplete copies, named ``prefix`` and more, that interrupted calls have left next to ``work``."""
    for left in work.parent.glob(f"{prefix}*"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink()


def _update(code: Path, work: Path, digest: str | None, prefix: str) -> list[str]:
    """Update ``work`` to ``code``, except files that the job has changed. Returns the files that both the job and the new code
    have changed; none if ``work`` has the code of this ``digest`` already. A file that the job has deleted is copied if the new
    code has changed it."""
    copied = _read_record(work)
    same = copied.digest == digest
    if digest is None or (same and not copied.begun and all(_form_in(work, p) is not None for p in copied.left)):
        return []
    _remove_leftovers(work, prefix)
    found = _entries(code)
    files = _forms(found)
    ours = copied.files.keys() | copied.begun.keys()
    begun = {path: [*copied.begun.get(path, ()), files.get(path)] for path in ours | files.keys()}
    # before anything is copied: an update after an interrupted one then gives the same result
    _write_record(work, replace(copied, begun=begun))
    for path in sorted(ours - files.keys(), reverse=True):  # first, since a directory may replace a file
        here = _form_in(work, path)
        if here is not None and here in copied.forms(path):
            (work / path).unlink(missing_ok=True)
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
            _replace_file(entry, work, prefix)
        else:
            left.append(path)
            del files[path]
    _write_record(work, CopiedCode(digest=digest, files=files, left=left))
    return [] if same else left


def _replace_file(entry: Entry, work: Path, prefix: str) -> None:
    """Copy one file or link of the code into ``work``, atomically over an existing one."""
    place = work / entry.path
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=work.parent))
    try:
        _write_entry(entry, made / "file")
        (made / "file").replace(place)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    fsync_path(place.parent)


def _forms(found: list[Entry]) -> dict[str, str]:
    """The form of each entry, by path."""
    return {entry.path: _form(entry.source) for entry in found}


def _form(path: Path) -> str:
    """Return text that identifies content and type of a path, such as a file's digest or a link's target."""
    if path.is_symlink():
        return f"link {path.readlink()}"
    if not path.is_file():
        return _OTHER
    inner = hashlib.sha256()
    for chunk in tree.read_chunks(path):
        inner.update(chunk)
    return f"{'x' if path.stat().st_mode & 0o111 else '-'} {inner.hexdigest()}"


def _form_in(work: Path, path: str) -> str | None:
    """Return the form of the relative ``path`` in the working directory: None if it does not exist, ``_OTHER`` also if it is
    unreadable."""
    place = work / path
    folders = list(place.parents)[: path.count("/")]
    if any(folder.is_symlink() or (folder.exists() and not folder.is_dir()) for folder in folders):
        return _OTHER
    if not os.path.lexists(place):
        return None
    try:
        return _form(place)
    except OSError:  # user code has made it unreadable
        return _OTHER


def _read_record(work: Path) -> CopiedCode:
    """The content of ``work.json``; an empty record if the file is missing or damaged."""
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


def _write_record(work: Path, copied: CopiedCode) -> None:
    """Write ``work.json``, next to ``work``, durably and atomically."""
    text = json.dumps(asdict(copied))  # ASCII, since a file name need not be valid text
    write_atomic(JobPaths(work.parent).work_file, text.encode(), durable=True)


def _copy(found: list[Entry], target: Path) -> None:
    """Copy the entries into the directory ``target`` and sync them, with permissions that let the owner write all of it."""
    folders = {target}
    for entry in found:
        place = target / entry.path
        place.parent.mkdir(parents=True, exist_ok=True)
        folders.update(p for p in place.parents if p.is_relative_to(target))
        _write_entry(entry, place)
    for folder in folders:
        folder.chmod(0o755)
        fsync_path(folder)


def _write_entry(entry: Entry, place: Path) -> None:
    """Write one entry of the code to ``place``: a link, or a synced copy of the file."""
    if entry.link is not None:
        place.symlink_to(entry.link)
        return
    shutil.copyfile(entry.source, place)
    place.chmod(0o755 if entry.executable else 0o644)
    fsync_path(place)
