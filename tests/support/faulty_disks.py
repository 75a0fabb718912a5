"""Jobs of warm attempts whose checkpoints lie on a disk of the test's own: a small tmpfs, or a file system on a loop device, with
a quota, slow, or failing beneath it. All are mounted where only the forked processes see them, and go with these."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_attempts import AttemptForkServer, ForkedJob
from tests.support.launch import Attempt
from tests.support.server import wait_for

STEPS, EVERY = 28, 4  # the disk fails between 8 and 12, and is repaired between 16 and 20
CODE = Path(__file__).with_name("fault_job")
CGROUPS = Path("/sys/fs/cgroup/blkio")
RATE = "blkio.throttle.write_bps_device"
_GET_STATUS, _SET_STATUS, _SIZE_LIMIT = 0x4C05, 0x4C04, 32  # linux/loop.h: LOOP_..._STATUS64, loop_info64.lo_sizelimit
_IMAGE = 128 << 20  # bytes; the least that Btrfs makes without mixed blocks, and sparse


class Place:
    """``disk``: a tmpfs that is mounted where the jobs that are made lie, with their checkpoints alone."""

    def __init__(self, root: Path) -> None:
        self.root, self.disk, self.slow = root, root / "disk", root / "slow"
        self.disk.mkdir()
        self.warm = AttemptForkServer(self.disk, "48m", self.slow)
        self._loops: dict[tuple[str, str], Loop] = {}
        self._jobs: list[ForkedJob] = []

    def close(self) -> None:
        """Nothing of what was run is alive afterwards: it would keep disks mounted."""
        for job in self._jobs:
            job.close()

    def job(
        self,
        job_id: str,
        held: list[int],
        on: Path | None = None,
        *,
        width: int = 256,
        policy: dict[str, Any] | None = None,
        **checkpoint: Any,
    ) -> Watched:
        """``on``: another disk for its checkpoints; ``held``, ``width``: see ``Faulty``."""
        gate, disk = self.root / f"gate-{job_id}", on or self.disk
        gate.mkdir()
        args = {"steps": STEPS, "gate": str(gate), "held": held, "width": width}
        spec = {
            "task": {"entrypoint": "fault_task:Faulty", "args": args},
            "code": {"path": str(CODE)},
            "checkpoint": {"every_steps": EVERY, "keep_last": 20, "first": "off", **checkpoint},
            "policy": policy or {},
        }
        job = ForkedJob(self.warm, self.root / "home", spec, CODE, job_id=job_id)
        self._jobs.append(job)
        job.paths.root.mkdir(parents=True)
        self.warm.visible_path(disk / job_id).mkdir()
        job.paths.checkpoints.symlink_to(disk / job_id)
        return Watched(job, gate, self.warm.visible_path(disk / job_id))

    def loop_device(self, kind: str, name: str = "shared") -> Loop:
        """A file system of that kind on a loop device; skips the test where there can be none."""
        if (kind, name) not in self._loops:
            self._loops[kind, name] = Loop(self.warm, self.root, kind, name)
        return self._loops[kind, name]


class Watched:
    """A job and its checkpoints as its processes see them."""

    def __init__(self, job: ForkedJob, gate: Path, checkpoints: Path) -> None:
        self.job, self.gate, self.checkpoints = job, gate, checkpoints

    def wait_held_at(self, attempt: Attempt, step: int) -> None:
        there = [self.gate / f"at.{step}.{rank}" for rank in range(2)]
        wait_for(lambda: all(p.exists() for p in there) or attempt.agent.poll() is not None, f"step {step}", 60, 0.01)
        assert attempt.agent.poll() is None, attempt.logs()

    def release_step(self, step: int) -> None:
        (self.gate / f"go.{step}").touch()

    def wait_reported(self, attempt: Attempt, kind: str, *steps: int) -> None:
        """Wait until rank 0 has told this, in this order, and nothing before it."""
        wait_for(lambda: len(self._steps(attempt, kind)) >= len(steps), f"{kind} {steps}\n{attempt.logs()}", 60, 0.01)
        assert self._steps(attempt, kind)[: len(steps)] == list(steps)

    @staticmethod
    def _steps(attempt: Attempt, kind: str) -> list[int]:
        return [m.step for m in attempt.messages(kind=kind)]

    def committed(self) -> list[int]:
        return sorted(int(p.parent.name[5:17]) for p in self.checkpoints.glob("*/MANIFEST.json"))

    def file_contents(self) -> dict[str, bytes]:
        """Every byte of what is committed."""
        folders = [p.parent for p in self.checkpoints.glob("*/MANIFEST.json")]
        return {f"{f.name}/{p.name}": p.read_bytes() for f in folders for p in f.iterdir()}


class Loop:
    """``at``: where it is mounted. The kernel lets go of the device when the mount goes (``autoclear``), which goes with the last
    process that sees it, however that ends."""

    def __init__(self, warm: AttemptForkServer, root: Path, kind: str, name: str) -> None:
        self._warm, self.at, self.image = warm, root / f"{kind}-{name}", root / f"{kind}-{name}.img"
        make = shutil.which(f"mkfs.{kind}")
        if make is None:
            pytest.skip(f"needs mkfs.{kind} (packages: e2fsprogs, btrfs-progs)")
        self.at.mkdir()
        with self.image.open("wb") as file:
            file.truncate(_IMAGE)
        subprocess.run([make, "-q", str(self.image)], check=True, capture_output=True)
        try:
            self.mount()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs loop devices, and {kind} in the kernel: {error.stderr.strip()}")

    def mount(self) -> None:
        self._warm.run_in_mount_namespace("mount", "-o", "loop", str(self.image), str(self.at))

    def umount(self) -> None:
        self._warm.run_in_mount_namespace("umount", str(self.at))

    @property
    def visible_path(self) -> Path:
        return self._warm.visible_path(self.at)

    @property
    def device(self) -> Path:
        found = subprocess.run(["losetup", "-n", "-O", "NAME", "-j", str(self.image)], capture_output=True, text=True)
        return Path(found.stdout.strip())

    def limit_device_size(self, size: int) -> None:
        """The device ends behind so many bytes from now on, whatever lies there: each read and write beyond is an input/output
        error. The image keeps its bytes."""
        fd = os.open(self.device, os.O_RDWR)
        try:
            info = bytearray(fcntl.ioctl(fd, _GET_STATUS, bytes(232)))
            struct.pack_into("Q", info, _SIZE_LIMIT, size)
            fcntl.ioctl(fd, _SET_STATUS, bytes(info))
        finally:
            os.close(fd)

    def quota(self, filler: int, more: int) -> None:
        """Of Btrfs: a file ``filler`` of so many bytes, what else is there now, and ``more`` are all that it may hold."""
        self._warm.run_in_mount_namespace("btrfs", "quota", "enable", str(self.at))
        self._warm.run_in_mount_namespace("btrfs", "qgroup", "limit", "none", str(self.at))
        (self.visible_path / "filler").write_bytes(os.urandom(filler))
        self.sync_deletions()
        shown = self._warm.run_in_mount_namespace("btrfs", "qgroup", "show", "-r", "--raw", str(self.at))
        (held,) = [line.split()[1] for line in shown.splitlines() if line.startswith("0/5 ")]
        self._warm.run_in_mount_namespace("btrfs", "qgroup", "limit", str(int(held) + more), str(self.at))

    def sync_deletions(self) -> None:
        """Of Btrfs: what was deleted counts no more."""
        self._warm.run_in_mount_namespace("btrfs", "filesystem", "sync", str(self.at))

    @contextmanager
    def throttled(self) -> Iterator[Throttle]:
        """What ``Warm`` forks within writes to it as slowly as is wanted; skips the test where the kernel cannot."""
        for old in CGROUPS.glob("ratchet-test-*"):
            with suppress(OSError):  # it has processes: of a test beside this one
                old.rmdir()
        group = CGROUPS / f"ratchet-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / "cgroup.procs").write_text(str(self._warm.pid))
            made = Throttle(group, self.device)
            made.set_rate(0)
        except OSError as error:
            pytest.skip(f"needs cgroups of version 1 with blkio throttling: {error}")
        try:
            yield made
        finally:
            made.set_rate(0)
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (CGROUPS / "cgroup.procs").write_text(pid)
            wait_for(lambda: not (group / "cgroup.procs").read_text(), "the control group to be empty", 10)
            group.rmdir()


class Throttle:
    """How many bytes a second may be written to a device."""

    def __init__(self, group: Path, device: Path) -> None:
        number = device.stat().st_rdev
        self._group = group
        self._file, self._device = group / RATE, f"{os.major(number)}:{os.minor(number)}"

    def set_rate(self, rate: int) -> None:
        """0: as many as it takes."""
        self._file.write_text(f"{self._device} {rate}")

    def throttle_only(self, pid: int) -> None:
        """Of what has been forked so far, this process alone is held up."""
        for other in (self._group / "cgroup.procs").read_text().split():
            if int(other) != pid:
                (CGROUPS / "cgroup.procs").write_text(other)
