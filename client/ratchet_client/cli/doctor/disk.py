"""Checks of the run directory's file system: free space, speed, guarantees. They use a temporary directory, which is removed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from ratchet_contract.atomic_write import fsync_path
from ratchet_contract.doctor.findings import Finding, failed, not_checked, ok, warning

MIN_FREE_BYTES: Final = 1 << 30
MIN_MB_PER_SECOND: Final = 20.0
"""MB/s below which saves slow down training: a checkpoint of 100 MB would take five seconds."""
NETWORK: Final = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "afs", "pvfs2", "panfs", "wekafs",
    "9p", "virtiofs", "fuse.",
)  # fmt: skip
"""Prefixes of type names (s3fs, sshfs and similar are ``fuse.*``): files on another machine, or managed by another kernel."""
MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_SECONDS: Final = 20.0
_PIECE: Final = 4 << 20
_PIECES: Final = 16
_ELSEWHERE: Final = "give a directory on a local disk: --home DIR or RATCHET_HOME"
_TRY_LOCK: Final = (
    "import fcntl,sys\n"
    "f = open(sys.argv[1], 'a')\n"
    "try:\n fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except BlockingIOError:\n sys.exit(3)\n"
)


def nearest_directory(home: Path) -> Path:
    """Return the run directory ``home`` if it exists, else its nearest existing parent. Raise ``OSError`` if that cannot be
    determined."""
    while not home.is_dir() and home != home.parent:
        home = home.parent
    return home


def probe(home: Path, *, sqlite: bool) -> list[Finding]:
    """Return the findings about the disk of the run directory ``home``. Creates and removes a temporary directory in it or a
    parent. ``sqlite``: the database is an SQLite file in ``home``."""
    try:
        place = nearest_directory(home)
    except OSError as error:
        return [_failed_check("run directory", home, error)]
    there = "" if place == home else f"{home} does not exist yet: checked {place}"
    found = [_kind(place, sqlite=sqlite), _free_space(place)]
    try:
        folder = Path(tempfile.mkdtemp(prefix=".ratchet-doctor-", dir=place))
    except OSError as error:
        return [
            failed(
                "run directory",
                "not writable",
                detail=f"{place}: {error.strerror}",
                cure=f"make it writable for this user, or {_ELSEWHERE}",
            ),
            *found,
        ]
    try:
        checks: tuple[tuple[str, Callable[[Path], list[Finding]]], ...] = (
            ("disk speed", _speed),
            ("file locks", _locks),
            ("rename", _rename),
            *((("sqlite", _sqlite),) if sqlite else ()),
        )
        for name, check in checks:
            try:
                found += check(folder)
            except OSError as error:
                found.append(_failed_check(name, place, error))
            except subprocess.TimeoutExpired:
                found.append(failed(name, "hangs", detail=f"{place}: no answer in {_SECONDS:g} s", cure=_ELSEWHERE))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [ok("run directory", "writable", there or str(home)), *found]


def _failed_check(name: str, place: Path, error: OSError) -> Finding:
    """Return the finding for a check that ended with ``error``. ``place``: the directory that was checked."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    cure = f"free space on {place} (`ratchet delete` removes old jobs), or {_ELSEWHERE}" if full else _ELSEWHERE
    return failed(name, "no space" if full else "not possible", detail=f"{place}: {error.strerror}", cure=cure)


def _free_space(place: Path) -> Finding:
    """Return the finding on free disk space; a warning below ``MIN_FREE_BYTES``, a failure if it is unknown."""
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return _failed_check("disk space", place, error)
    value = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free < MIN_FREE_BYTES:
        return warning(
            "disk space",
            value,
            detail="a save without enough free space fails, and so does its job",
            cure=f"free space on {place}, set checkpoint.keep_last lower, or {_ELSEWHERE}",
        )
    return ok("disk space", value)


# --- file system type -----------------------------------------------------------------------------------------------------------


def file_system(place: Path, mountinfo: str) -> str | None:
    """Return the type of the mounted file system that contains ``place``, like ``ext4``; None if unknown. ``mountinfo``: text of
    ``/proc/self/mountinfo``."""
    best: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[4]))
        # Of several mounted at one directory, the last one is on top.
        if place.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), right.split()[0])
    return best[1] if best else None


def _kind(place: Path, *, sqlite: bool) -> Finding:
    """Return the finding on the type of the file system at ``place``. A file system in memory gives a warning, and with
    ``sqlite`` also a network file system. ``sqlite``: the database is an SQLite file there."""
    try:
        kind = file_system(place.resolve(), Path("/proc/self/mountinfo").read_text())
    except OSError:
        kind = None
    if kind is None:
        return not_checked(
            "file system", "unknown", detail="/proc/self/mountinfo does not contain it", cure=f"df -T {place}"
        )
    if kind.startswith(NETWORK) and sqlite:
        return warning(
            "file system",
            kind,
            cure=f"{_ELSEWHERE}; or keep the database elsewhere: RATCHET_DATABASE_URL with PostgreSQL",
            detail="a network file system: SQLite's WAL needs shared memory, which works on one machine only; locks may not hold",
        )
    if kind in MEMORY:
        return warning(
            "file system",
            kind,
            detail="in memory: checkpoints are gone after a restart, and count as memory",
            cure=_ELSEWHERE,
        )
    return ok("file system", kind, "is deleted with the container" if kind == "overlay" else None)


# --- capabilities --------------------------------------------------------------------------------------------------------


def _speed(folder: Path) -> list[Finding]:
    """Return the findings on write and read speed, measured with a temporary file of up to 64 MiB in ``folder``."""
    piece = os.urandom(_PIECE)
    pieces = max(1, min(_PIECES, shutil.disk_usage(folder).free // 4 // _PIECE))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begin = time.monotonic()
        written = 0
        while written < pieces * _PIECE and (written == 0 or time.monotonic() - begin < 1.0):
            written += file.write(piece)
        os.fsync(file.fileno())
        write = written / (time.monotonic() - begin) / 1e6
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # otherwise the page cache would be measured
        file.seek(0)
        begin, room = time.monotonic(), bytearray(_PIECE)
        while file.readinto(room):
            pass
        read = written / (time.monotonic() - begin) / 1e6
    amount = f"{written >> 20} MiB"
    slow = "checkpoints will slow down training"
    return [
        ok("disk write", f"{write:.0f} MB/s", f"{amount} and fsync")
        if write >= MIN_MB_PER_SECOND
        else warning(
            "disk write",
            f"{write:.0f} MB/s",
            detail=f"{amount} and fsync: {slow}",
            cure=f"save less often (checkpoint.every_steps), or {_ELSEWHERE}",
        ),
        ok("disk read", f"{read:.0f} MB/s", amount)
        if read >= MIN_MB_PER_SECOND
        else warning(
            "disk read", f"{read:.0f} MB/s", detail=f"{amount}: a resume reads and verifies every byte", cure=_ELSEWHERE
        ),
    ]


def _locks(folder: Path) -> list[Finding]:
    """Return the finding on file locks: another process must not be able to take a lock that this process holds."""
    # Such locks distinguish a dead agent from a live one.
    path = folder / "lock"
    command = [sys.executable, "-I", "-S", "-c", _TRY_LOCK, str(path)]
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = subprocess.run(command, capture_output=True, timeout=_SECONDS).returncode
    free = subprocess.run(command, capture_output=True, timeout=_SECONDS).returncode
    if (held, free) == (3, 0):
        return [ok("file locks", "work", "flock between two processes")]
    return [
        failed(
            "file locks",
            "do not work",
            detail="flock does not exclude a second process: a dead agent would look alive, or a live one dead",
            cure=f"mount it with locking (NFS: without nolock or local_lock), or {_ELSEWHERE}",
        )
    ]


def _rename(folder: Path) -> list[Finding]:
    """Return the finding on renaming a file onto an existing one, as is done for a checkpoint's manifest."""
    old, new = folder / "old", folder / "new"
    old.write_text("old")
    new.write_text("new")
    new.replace(old)
    fsync_path(folder)
    if old.read_text() == "new" and not new.exists():
        return [ok("rename", "works", "onto an existing file, directory synced")]
    return [
        failed("rename", "does not work", detail="a file that was renamed over another is missing", cure=_ELSEWHERE)
    ]


def _sqlite(folder: Path) -> list[Finding]:
    """Return the finding on SQLite in WAL mode: one connection must be able to read while another one writes."""
    path = folder / "probe.db"
    try:
        with closing(_connect(path)) as one, closing(_connect(path)) as two:
            (mode,) = one.execute("PRAGMA journal_mode = WAL").fetchone()
            one.execute("CREATE TABLE t (x)")
            one.execute("BEGIN IMMEDIATE")
            one.execute("INSERT INTO t VALUES (1)")
            seen = two.execute("SELECT count(*) FROM t").fetchone()[0]
            one.execute("COMMIT")
            after = two.execute("SELECT count(*) FROM t").fetchone()[0]
    except sqlite3.Error as error:
        return [
            failed(
                "sqlite",
                "does not work",
                detail=str(error),
                cure=f"{_ELSEWHERE}, or use PostgreSQL: RATCHET_DATABASE_URL",
            )
        ]
    if (mode, seen, after) != ("wal", 0, 1):
        return [
            failed(
                "sqlite",
                f"journal mode {mode}",
                detail="WAL does not work on this file system",
                cure=f"{_ELSEWHERE}, or use PostgreSQL: RATCHET_DATABASE_URL",
            )
        ]
    return [ok("sqlite", "WAL works", f"SQLite {sqlite3.sqlite_version}")]


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=5.0, isolation_level=None)
