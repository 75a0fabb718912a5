"""Decides whether checkpoints can be trusted to a file system, by its mount table entry and by a trial. The commit protocol
requires durable ``fsync`` of files and directories, atomic ``rename``, exclusive creation of names, and on several nodes
close-to-open consistency."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ratchet_contract.atomic_write import TMP_SUFFIX, atomic_file, fsync_path, write_all

_PREFIX: Final = ".ratchet-probe-"
_STALE_SECONDS: Final = 3600.0  # seconds after which a scratch directory is abandoned
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM})
_EXISTS: Final = frozenset({errno.EEXIST, errno.ENOTEMPTY})


class Unfit(Exception):
    """Raised when a file system fails the trial. The message names what it failed to do, without a full stop."""


def probe(directory: Path) -> None:
    """Try exclusive creation, fsync and renames in ``directory``. Raise ``Unfit`` if they do not work as required, ``OSError``
    for other failures, such as a full disk."""
    _remove_stale(directory)
    scratch = directory / f"{_PREFIX}{secrets.token_hex(8)}"
    scratch.mkdir()
    try:
        _check_exclusive_create(scratch)
        _check_file_rename(scratch)
        _check_directory_rename(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_exclusive_create(scratch: Path) -> None:
    """Check that creating a name that exists fails, with ``O_EXCL`` and with ``mkdir``. Raise ``Unfit`` if not."""
    path, flags = scratch / "once", os.O_WRONLY | os.O_CREAT | os.O_EXCL
    os.close(os.open(path, flags, 0o644))
    _check_refused("O_EXCL created a file that already existed", lambda: os.close(os.open(path, flags, 0o644)))
    _check_refused("mkdir created a directory that already existed", scratch.mkdir)


def _check_file_rename(scratch: Path) -> None:
    """Check that a written and renamed file is whole under its new name, and gone under the old one. Raise ``Unfit``."""
    path = scratch / "file"
    for content in (b"first", b"second, and longer"):
        with _supported("write, fsync and rename of a file"), atomic_file(path, durable=False) as fd:
            write_all(fd, memoryview(content))
            os.fsync(fd)
        with _supported("fsync of a directory"):
            fsync_path(scratch)
        found = path.read_bytes()
        if found != content or path.stat().st_size != len(content) or any(scratch.glob(f"*{TMP_SUFFIX}")):
            raise Unfit(f"rename left {found[:20]!r} where {content!r} was written")


def _check_directory_rename(scratch: Path) -> None:
    """Check that a rename moves a whole directory, and never onto a directory that is not empty. Raises ``Unfit``."""
    one, two = scratch / "one", scratch / "two"
    one.mkdir()
    (one / "inside").write_bytes(b"one")
    with _supported("rename of a directory"):
        one.rename(two)
        fsync_path(scratch)
    if one.exists() or (two / "inside").read_bytes() != b"one":
        raise Unfit("rename moved a directory in parts")
    one.mkdir()
    with suppress(OSError):  # with any error: sshfs returns EPERM, mergerfs EXDEV
        one.rename(two)
    if not one.is_dir() or (two / "inside").read_bytes() != b"one":
        raise Unfit("rename replaced a directory that was not empty")


class _supported:
    """Context manager: converts an ``OSError`` that means "not supported" to ``Unfit``. ``what``: the operation, for the
    message."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and error.errno in _UNSUPPORTED:
            raise Unfit(f"{self._what} is not possible there: {error.strerror}") from error


def _check_refused(message: str, action: Callable[[], object]) -> None:
    """Call ``action``, and check that it fails because a name exists already. Raise ``Unfit`` with ``message`` if it succeeds.
    An ``OSError`` for another reason is not caught."""
    try:
        action()
    except OSError as error:
        if error.errno in _EXISTS:
            return
        raise
    raise Unfit(message)


def _remove_stale(directory: Path) -> None:
    """Remove scratch directories that killed processes left in ``directory`` more than an hour ago. Errors are ignored."""
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


_OBJECT_STORE_REASON: Final = (
    "it is an object store behind FUSE: no atomic rename, no fsync. Put the run directory on a disk or a shared file system, "
    "and let Ratchet itself copy checkpoints to the store (checkpoint.uri)"
)
_FAT_REASON: Final = (
    "it keeps no journal: a loss of power during a rename can lose both names. Use ext4, XFS or another journaling one"
)
# s3fs: "renames via server-side copy" (README); goofys: "fsync is ignored" (README); gcsfuse: its caching "breaks the
# consistency guarantees" (docs/semantics.md); Mountpoint: no rename (doc/SEMANTICS.md); blobfuse: no atomic rename
# (wiki, Differences from POSIX); rclone: files go up after they are closed (rclone mount, --vfs-write-back).
_REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("s3fs", "gcsfuse", "goofys", "mountpoint-s3", "rclone", "blobfuse", "blobfuse2", "geesefs", "ossfs", "cosfs"),
        _OBJECT_STORE_REASON,
    ),
    **dict.fromkeys(("vfat", "msdos", "exfat"), _FAT_REASON),
}
"""Reasons by type, without the prefix ``fuse.``; Mountpoint has the type ``fuse``, and its name as the source."""

_REFUSED_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "nfs": {
        **dict.fromkeys(
            ("soft", "softerr"), "a server that answers late can cause silent data corruption (nfs(5)). Mount it hard"
        ),
        "nocto": "nodes would not see the writes of other nodes (nfs(5)). Mount it without nocto",
    },
    "cifs": {"nostrictsync": "fsync does not reach the server's disk (mount.cifs(8)). Mount it without nostrictsync"},
    # Linux, Documentation/filesystems/overlayfs.rst
    "overlay": {"volatile": "nothing is ever synced to the disk below. Mount a volume there"},
}
_NOTES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("tmpfs", "ramfs"), "it is in memory: checkpoints are lost after a reboot of this machine"),
    "nfs": "fsync is only as durable as the server: export it with sync, not async (exports(5))",
    "cifs": "fsync is only as durable as the server: its disk must not answer before the bytes are on it",
    "lustre": "Ratchet needs only close-to-open consistency and rename of it; no flock mount option is needed",
    "ext2": "it keeps no journal: after a loss of power it needs fsck before it is mounted again",
    "juicefs": "mount it without --writeback: with it fsync ends on this machine's disk",
    "sshfs": "fsync and atomic rename need a server with OpenSSH's extensions",
}
_TYPE_ALIASES: Final[Mapping[str, str]] = {"nfs4": "nfs", "smb3": "cifs", "smbfs": "cifs", "ext3": "ext4"}
_PROVEN: Final = frozenset(
    {"ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs", "ceph", "gpfs", "beegfs", "lustre", "wekafs", "overlay"}
)
_NO_BARRIER: Final = frozenset({"nobarrier", "barrier=0"})


@dataclass(frozen=True)
class Mount:
    """The mount that contains a path. ``type``: such as ``ext4`` or ``fuse.sshfs``; ``options``: of mount and superblock."""

    point: str
    type: str
    source: str = ""
    options: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """The type without ``fuse.``, and with one name for each family, such as ``nfs`` for ``nfs4``."""
        name = self.type.removeprefix("fuse.")
        # such as mountpoint-s3
        if name == "fuse" and self.source in _REFUSED:
            return self.source
        return _TYPE_ALIASES.get(name, name)


@dataclass(frozen=True)
class Verdict:
    """The decision about a directory. ``status``: ``noted`` means trusted, with a remark for the user. ``reason``: the remark
    or the cause of a refusal; None if ``status`` is ``trusted``."""

    status: Literal["trusted", "noted", "refused"]
    directory: Path
    mount: Mount
    reason: str | None = None

    def __str__(self) -> str:
        where = f"{self.directory} is on {self.mount.type} (mounted at {self.mount.point})"
        if self.status == "refused":
            return f"{where}, which is not safe for checkpoints: {self.reason}"
        return where if self.reason is None else f"{where}: {self.reason}"


def check_directory(directory: Path, *, known: bool = True) -> Verdict:
    """Return the verdict on ``directory``. If its mount is not refused, a trial (``probe``) must succeed, too. ``known``: if
    False, known types of file system are not tried. Raise ``OSError`` if the trial is not possible."""
    mount = mount_of(directory)
    verdict = classify(directory, mount)
    if verdict.status != "refused" and (known or mount.kind not in _PROVEN | set(_NOTES)):
        try:
            probe(directory)
        except Unfit as error:
            return Verdict(
                "refused", directory, verdict.mount, f"{error}. Put the run directory on another file system"
            )
    return verdict


def classify(directory: Path, mount: Mount) -> Verdict:
    """Return the verdict on ``directory`` by its ``mount`` alone. The remark on an unknown type says that a trial has
    succeeded, so the caller must make the trial."""
    kind = mount.kind
    if kind in _REFUSED:
        return Verdict("refused", directory, mount, _REFUSED[kind])
    for option, why in _REFUSED_OPTIONS.get(kind, {}).items():
        if option in mount.options:
            return Verdict("refused", directory, mount, f"it is mounted {option}: {why}")
    reason = _NOTES.get(kind)
    if mount.options & _NO_BARRIER:
        reason = "it is mounted without barriers: a loss of power can undo an fsync"
    elif reason is None and kind not in _PROVEN:
        reason = (
            f"{mount.type} is unknown to Ratchet; a trial succeeded, but cannot test a loss of power or other nodes"
        )
    return Verdict("trusted" if reason is None else "noted", directory, mount, reason)


def mount_of(path: Path, table: str | None = None) -> Mount:
    """Return the mount that contains ``path``; of type ``unknown`` if none is found. ``table``: replaces
    ``/proc/self/mountinfo``."""
    if table is None:
        try:
            table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return Mount("/", "unknown")
    real = os.path.realpath(path)
    best = Mount("/", "unknown")
    for line in table.splitlines():
        mount = _parse(line)
        if mount is None or not (real == mount.point or real.startswith(mount.point.rstrip("/") + "/")):
            continue
        if len(mount.point) >= len(best.point):  # of several at one point the last hides the others
            best = mount
    return best


def _parse(line: str) -> Mount | None:
    """Return the mount of a line of mountinfo (proc(5)); None for a line of another form."""
    before, separator, after = line.partition(" - ")
    left, right = before.split(" "), after.split(" ")
    if not separator or len(left) < 6 or len(right) < 3:
        return None
    options = frozenset([*left[5].split(","), *right[2].split(",")])
    return Mount(_unescape(left[4]), right[0], _unescape(right[1]), options)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
