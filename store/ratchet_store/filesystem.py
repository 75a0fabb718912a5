"""Can checkpoints be trusted to this file system? What it says of itself, and what it does when it is tried.

The commit protocol needs of a file system:

- ``fsync`` of a file keeps its bytes, ``fsync`` of a directory its names, over a loss of power;
- ``rename`` gives a whole file its name in one moment, also in a directory that others look into, and moves a whole directory;
- a name made with ``O_EXCL`` or ``mkdir`` is made once, and a directory is never renamed onto one that holds something;
- on several nodes: who opens a file after it was closed and renamed elsewhere reads what was written (close-to-open). Names may
  be seen late: ranks of other nodes wait for them.

It needs no byte-range locks, no hard links, no memory maps, and nothing that two nodes write at once.

What is refused, and by which word of its makers:

- FUSE on object stores, which have no rename and no fsync. s3fs: "renames via server-side copy" (README; under Limitations: not
  atomic); goofys: "fsync is ignored, files are only flushed on close" (README); gcsfuse: caching of metadata "breaks the
  consistency guarantees" (docs/semantics.md); Mountpoint for S3: "does not emulate operations like rename on S3 general purpose
  buckets" (doc/SEMANTICS.md); blobfuse: "Atomic rename operations are not supported by the Azure Storage Blob Service" (wiki,
  Differences from POSIX); rclone: files go up some seconds after they are closed (rclone mount, --vfs-write-back).
- NFS mounted ``soft`` or ``softerr``: a time-out "can cause silent data corruption"; ``nocto``: no close-to-open (nfs(5)).
- SMB mounted ``nostrictsync``: fsync does not ask the server to flush (mount.cifs(8)).
- overlay mounted ``volatile``: no sync call reaches the file system below (Linux, Documentation/filesystems/overlayfs.rst).
- FAT and exFAT: no journal, so that a loss of power in a rename can lose both names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ratchet_store.probe import Unfit, probe

_OBJECTS: Final = (
    "it is an object store behind FUSE: no atomic rename, no fsync. Put the run directory on a disk or a shared file system, "
    "and let Ratchet itself copy checkpoints to the store (checkpoint.uri)"
)
_FAT: Final = (
    "it keeps no journal: a loss of power during a rename can lose both names. Use ext4, XFS or another journaling one"
)
_REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("s3fs", "gcsfuse", "goofys", "mountpoint-s3", "rclone", "blobfuse", "blobfuse2", "geesefs", "ossfs", "cosfs"),
        _OBJECTS,
    ),
    **dict.fromkeys(("vfat", "msdos", "exfat"), _FAT),
}
"""By type, without ``fuse.`` before it; Mountpoint calls itself ``fuse`` and has its name as the source."""

_REFUSED_OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "nfs": {
        **dict.fromkeys(
            ("soft", "softerr"), "a server that answers late can cause silent data corruption (nfs(5)). Mount it hard"
        ),
        "nocto": "nodes would not see what others have written (nfs(5)). Mount it without nocto",
    },
    "cifs": {"nostrictsync": "fsync does not reach the server's disk (mount.cifs(8)). Mount it without nostrictsync"},
    "overlay": {"volatile": "nothing is ever synced to the disk below. Mount a volume there"},
}
_NOTES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("tmpfs", "ramfs"), "it lies in memory: checkpoints are gone after a reboot of this machine"),
    "nfs": "fsync is as good as the server: export it with sync, not async (exports(5))",
    "cifs": "fsync is as good as the server: its disk must not answer before the bytes are on it",
    "lustre": "nothing but close-to-open and rename is asked of it; no flock mount option is needed",
    "ext2": "it keeps no journal: after a loss of power it needs fsck before it is mounted again",
    "juicefs": "mount it without --writeback: with it fsync ends on this machine's disk",
    "sshfs": "fsync and atomic rename need a server with OpenSSH's extensions",
}
_KIN: Final[Mapping[str, str]] = {"nfs4": "nfs", "smb3": "cifs", "smbfs": "cifs", "ext3": "ext4"}
_PROVEN: Final = frozenset(
    {"ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs", "ceph", "gpfs", "beegfs", "lustre", "wekafs", "overlay"}
)
_NO_BARRIER: Final = frozenset({"nobarrier", "barrier=0"})


@dataclass(frozen=True)
class Mount:
    """Where a path lies: mount point, type (``fuse.sshfs``), source and options, those of mount and superblock together."""

    point: str
    type: str
    source: str = ""
    options: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """The type without ``fuse.``, by the name of its family."""
        name = self.type.removeprefix("fuse.")
        if name == "fuse" and self.source in _REFUSED:
            return self.source
        return _KIN.get(name, name)


@dataclass(frozen=True)
class Verdict:
    """``trusted``, trusted and ``noted`` with a ``reason``, or ``refused`` for one."""

    status: Literal["trusted", "noted", "refused"]
    directory: Path
    mount: Mount
    reason: str | None = None

    def __str__(self) -> str:
        where = f"{self.directory} lies on {self.mount.type} (mounted at {self.mount.point})"
        if self.status == "refused":
            return f"{where}, which checkpoints cannot be trusted to: {self.reason}"
        return where if self.reason is None else f"{where}: {self.reason}"


def examine(directory: Path, *, known: bool = True) -> Verdict:
    """What the mount table says of ``directory``, and unless that is a refusal, what a trial in it shows (``known`` False: tried
    only where nothing is known of its kind). The directory must be there. Raises ``OSError`` where it cannot be tried: a full
    disk, a missing right, a read-only mount say nothing of its kind."""
    mount = mount_of(directory)
    verdict = judge(directory, mount)
    if verdict.status != "refused" and (known or mount.kind not in _PROVEN | set(_NOTES)):
        try:
            probe(directory)
        except Unfit as error:
            return Verdict(
                "refused", directory, verdict.mount, f"{error}. Put the run directory on another file system"
            )
    return verdict


def judge(directory: Path, mount: Mount) -> Verdict:
    """What is known of that kind of file system under those options."""
    kind = mount.kind
    if kind in _REFUSED:
        return Verdict("refused", directory, mount, _REFUSED[kind])
    for option, why in _REFUSED_OPTIONS.get(kind, {}).items():
        if option in mount.options:
            return Verdict("refused", directory, mount, f"it is mounted {option}: {why}")
    reason = _NOTES.get(kind)
    if mount.options & _NO_BARRIER:
        reason = "it is mounted without barriers: a loss of power can take back what fsync had promised"
    elif reason is None and kind not in _PROVEN:
        reason = f"nothing is known of {mount.type}; a trial went well, but shows nothing of a loss of power, nor of other nodes"
    return Verdict("trusted" if reason is None else "noted", directory, mount, reason)


def mount_of(path: Path, table: str | None = None) -> Mount:
    """Where ``path`` lies, be it there or not. ``table``: the text of ``/proc/self/mountinfo``, read where None; where there is
    none, the type is ``unknown``."""
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
    """A line of mountinfo (proc(5)): ``id parent major:minor root point options [optional ...] - type source super-options``."""
    before, separator, after = line.partition(" - ")
    left, right = before.split(" "), after.split(" ")
    if not separator or len(left) < 6 or len(right) < 3:
        return None
    options = frozenset([*left[5].split(","), *right[2].split(",")])
    return Mount(_unescape(left[4]), right[0], _unescape(right[1]), options)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
