"""Which file systems checkpoints are trusted to: by what the mount table says, and by what a trial in the directory shows."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ratchet_service.preflight import paths
from ratchet_service.preflight.report import Report
from ratchet_store.filesystem import mount_policy
from ratchet_store.filesystem.mount_policy import Mount, check_directory, classify, mount_of

TABLE = r"""
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
30 22 0:30 / /mnt/two\040words rw - nfs4 server:/export rw,vers=4.2,hard,proto=tcp
31 22 0:31 / /mnt/soft rw - nfs server:/export rw,vers=3,soft,timeo=600
32 22 0:32 / /data rw - xfs /dev/sdb rw
33 32 0:33 / /data rw - fuse.gcsfuse bucket rw,user_id=0
34 22 0:34 / /mnt/s3 rw - fuse mountpoint-s3 rw
35 22 0:35 / /database rw - vfat /dev/sdc rw
not a line
"""


@pytest.mark.parametrize(
    ("path", "point", "kind", "status"),
    [
        ("/home/me/.ratchet", "/", "ext4", "trusted"),
        ("/mnt/two words/runs", "/mnt/two words", "nfs", "noted"),
        ("/mnt/soft", "/mnt/soft", "nfs", "refused"),
        ("/data/runs", "/data", "gcsfuse", "refused"),  # the later mount hides the earlier one
        ("/mnt/s3/runs", "/mnt/s3", "mountpoint-s3", "refused"),
        ("/database/runs", "/database", "vfat", "refused"),
    ],
)
def test_mount_verdict_uses_innermost_mount_of_path(path: str, point: str, kind: str, status: str) -> None:
    mount = mount_of(Path(path), TABLE)
    assert (mount.point, mount.kind) == (point, kind)
    verdict = classify(Path(path), mount)
    assert verdict.status == status and path in str(verdict) and mount.type in str(verdict)


@pytest.mark.parametrize(
    ("type_", "options", "status", "word"),
    [
        ("nfs4", "rw,hard,softreval", "noted", "sync"), ("nfs", "softerr", "refused", "hard"),
        ("nfs", "nocto", "refused", "nodes"),
        ("cifs", "rw,soft", "noted", "server"), ("cifs", "nostrictsync", "refused", "fsync"),
        ("overlay", "rw", "trusted", "overlay"),
        ("overlay", "rw,volatile", "refused", "volume"), ("tmpfs", "rw", "noted", "reboot"), ("lustre", "rw", "noted", "lustre"),
        ("fuse.s3fs", "rw", "refused", "checkpoint.uri"), ("fuse.rclone", "rw", "refused", "checkpoint.uri"),
        ("exfat", "rw", "refused", "journal"), ("ext4", "rw,nobarrier", "noted", "power"), ("xfs", "rw", "trusted", "xfs"),
        ("fuse.something", "rw", "noted", "unknown to Ratchet"), ("9p", "rw", "noted", "unknown to Ratchet"),
    ],
)  # fmt: skip
def test_mount_verdict_depends_on_type_and_options(type_: str, options: str, status: str, word: str) -> None:
    verdict = classify(Path("/runs"), Mount("/", type_, "source", frozenset(options.split(","))))
    assert verdict.status == status and word in str(verdict)


def test_file_system_probe_accepts_local_disk_and_leaves_no_files(tmp_path: Path) -> None:
    stale = tmp_path / ".ratchet-probe-old"
    stale.mkdir()
    (stale / "file").touch()
    os.utime(stale, (0, 0))
    assert check_directory(tmp_path).status in ("trusted", "noted")
    assert list(tmp_path.iterdir()) == []
    assert mount_of(tmp_path).type != "unknown"


@pytest.mark.parametrize(
    ("call", "number", "text"),
    [
        ("rename", errno.ENOSYS, "rename"), ("fsync", errno.EINVAL, "fsync"), ("rename", errno.EXDEV, "rename"),
        ("fsync", errno.EIO, None), ("mkdir", errno.EACCES, None), ("mkdir", errno.EROFS, None), ("write", errno.ENOSPC, None),
    ],
)  # fmt: skip
def test_file_system_probe_separates_unsupported_from_temporary_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, text: str | None
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    if text is None:
        with pytest.raises(OSError) as caught:
            check_directory(tmp_path)
        assert caught.value.errno == number
    else:
        verdict = check_directory(tmp_path)
        assert verdict.status == "refused" and text in str(verdict)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_file_system_probe_detects_non_atomic_or_clobbering_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def copies(source: Any, target: Any) -> None:
        if Path(source).is_dir():
            real(source, target)
        else:
            Path(target).write_bytes(Path(source).read_bytes())

    def clobbers(source: Any, target: Any) -> None:
        if Path(target).is_dir():
            real(target, f"{target}.away")
        real(source, target)

    for act, text in [(copies, "rename left"), (clobbers, "replaced a directory that was not empty")]:
        monkeypatch.setattr(os, "rename", act)
        verdict = check_directory(tmp_path)
        monkeypatch.undo()
        assert verdict.status == "refused" and text in str(verdict)


def test_run_directory_mount_policy_refuses_or_warns_at_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for type_, problems, warnings in [("fuse.goofys", 1, 0), ("nfs4", 0, 1), ("ext4", 0, 0)]:
        monkeypatch.setattr(mount_policy, "mount_of", lambda _, type_=type_: Mount("/mnt", type_))
        report = Report()
        paths.check(tmp_path, report)
        assert (len(report.problems), len(report.warnings)) == (problems, warnings)
    monkeypatch.undo()
    paths.check(tmp_path / "not there", Report())
