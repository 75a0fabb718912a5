"""What ``ratchet doctor`` reads from the system, from text as the system writes it; and the deadlines of its checks."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from pydantic import ValidationError

from ratchet_client.cli import doctor
from ratchet_client.cli.doctor import disk, exactness, network, probes
from ratchet_client.cli.doctor.disk import file_system
from ratchet_client.cli.doctor.machine import CgroupLimits, cgroup_limits, cores, shared_memory
from ratchet_client.cli.doctor.progress import Progress
from ratchet_client.cli.shared.options import Settings
from ratchet_contract.doctor.findings import Finding, not_checked, ok, warning
from ratchet_contract.doctor.installed_packages import release_tuple, required_packages, satisfies
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import JobPhase
from ratchet_hooks.specs.registry import HOOKS
from ratchet_hooks.torch_versions import OLDEST, TESTED, untested
from ratchet_worker.doctor.gpus import findings_without_torch, query_smi
from tests.support.scripted_server import Reply, serving
from tests.support.scripted_server import ok as ok_reply
from tests.support.server import processes_below, wait_for

RUNNING, SUCCEEDED = JobPhase.RUNNING, JobPhase.SUCCEEDED
MOUNTS = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:50 / /data rw - nfs4 server:/export rw
31 30 0:51 / /data/fast\040disk rw - xfs /dev/nvme0 rw
32 22 0:52 / /data/late rw - tmpfs none rw
33 22 0:53 / /data/late rw - ext4 /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/home/me", "ext4"), ("/data/jobs", "nfs4"), ("/data/fast disk/x", "xfs"), ("/data/late", "ext4"), ("/database", "ext4"),
    ],
)  # fmt: skip
def test_file_system_returns_type_of_mount_containing_directory(place: str, kind: str) -> None:
    assert file_system(Path(place), MOUNTS) == kind


def test_run_directory_that_cannot_be_looked_up_is_a_failed_finding(tmp_path: Path) -> None:
    """The name is too long: an error for root too, unlike a parent directory without permission."""
    (found,) = disk.probe(tmp_path / ("n" * 300) / "home", sqlite=True)
    assert (found.name, found.status, found.value) == ("run directory", "failed", "not possible")
    assert "File name too long" in str(found.detail) and "--home DIR" in str(found.cure)


def test_unknown_free_space_is_a_finding_beside_the_other_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a FUSE file system that cannot tell its free space."""

    def disk_usage(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    found = {f.name: f for f in disk.probe(tmp_path, sqlite=True)}
    space = found["disk space"]
    assert (space.status, space.detail) == ("failed", f"{tmp_path}: Input/output error") and space.cure
    assert {found[name].status for name in ("run directory", "rename", "sqlite", "file locks")} == {"ok"}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_cgroup_v2_limits_take_tightest_limit_of_parent_groups(tmp_path: Path) -> None:
    root = tree(tmp_path / "cg", {
        "pod/cpu.max": "150000 100000\n", "pod/one/cpu.max": "max 100000\n", "pod/one/memory.max": "8589934592\n",
        "pod/one/memory.current": "1000\n", "pod/memory.max": "4294967296\n", "pod/memory.current": "2000\n",
    })  # fmt: skip
    (tmp_path / "self").write_text("0::/pod/one\n")
    assert cgroup_limits(tmp_path / "self", root) == CgroupLimits(1.5, 4 << 30, 2000)


def test_cgroup_v1_limits_are_read_and_missing_cgroup_has_none(tmp_path: Path) -> None:
    root = tree(tmp_path / "cg", {
        "cpu,cpuacct/docker/a/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000\n",
        "memory/docker/a/memory.limit_in_bytes": "1073741824\n", "memory/memory.limit_in_bytes": "9223372036854771712\n",
    })  # fmt: skip
    (tmp_path / "self").write_text("3:memory:/docker/a\n2:cpu,cpuacct:/docker/a\n1:name=systemd:/\n")
    assert cgroup_limits(tmp_path / "self", root) == CgroupLimits(0.5, 1 << 30, None)
    assert cgroup_limits(tmp_path / "self", tmp_path / "nothing") == CgroupLimits()


def test_cpu_quota_below_core_count_suggests_cpu_slots_option() -> None:
    found = cores(CgroupLimits(cores=0.5))
    assert found.status == "warning" and found.cure == "ratchet serve --cpu-slots 1"
    assert cores(CgroupLimits(cores=4096.0)).status == "ok"


def test_missing_shared_memory_is_a_warning_with_cure(tmp_path: Path) -> None:
    found = shared_memory(tmp_path / "shm")
    assert found.status == "warning" and "--shm-size" in str(found.cure)


def test_satisfies_compares_version_with_specifier() -> None:
    wanted = "<2.14,>=2.13"
    given = ["2.13.0+cu130", "2.13", "2.13.9", "2.12.9", "2.14.0", "2.14"]
    assert [satisfies(version, wanted) for version in given] == [True, True, True, False, False, False]


def test_worker_packages_are_installed_and_torch_matches_policy() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    asked = {line.split(">")[0].split("[")[0] for line in project["optional-dependencies"]["worker"]}
    assert {p.name for p in required_packages("worker")} == asked and all(
        p.is_satisfied for p in required_packages("worker")
    )
    assert f"torch>={OLDEST}" in project["optional-dependencies"]["worker"]
    assert min(TESTED, key=release_tuple) == OLDEST and [untested(f"{version}.1+cpu") for version in TESTED] == [
        None
    ] * len(TESTED)
    assert "tests run on torch 2.9" in str(untested("2.90.0")) and untested("unknown") is not None


def test_finding_without_cure_is_rejected() -> None:
    with pytest.raises(ValidationError, match="needs a cure"):
        Finding(name="disk", status="failed", value="full")


def test_check_that_hangs_or_raises_is_reported_as_finding() -> None:
    never = threading.Event()
    (hangs,) = probes.with_timeout(0.05, "mount", lambda: [ok("mount", str(never.wait(20)))])
    never.set()
    assert (hangs.name, hangs.status, hangs.value) == ("mount", "failed", "hangs")
    (breaks,) = probes.with_timeout(5, "mount", lambda: [ok("mount", str(1 // 0))])
    assert breaks.status == "not-checked" and "ZeroDivisionError" in str(breaks.detail)


def test_hanging_probe_is_killed_with_child_processes(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{sys.executable} -c 'import time; time.sleep(600)' {tmp_path} &\nwait\n")
    script.chmod(0o755)
    with probes.start_probe(probes.Probe("worker python", [str(script)], "worker", 0.3)) as answer:
        assert answer().findings[0].value == "hangs"
    wait_for(lambda: not processes_below(tmp_path), "what it had started to go", 10)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Mon, 05 Jan 2026 12:00:00 GMT", "agrees"),
        ("Mon, 05 Jan 2026 12:00:00 -0000", "agrees"),  # RFC 5322: UTC, of an unknown time zone
        ("Mon, 05 Jan 2026 13:00:00", "+3600 s"),
        ("Mon, 05 Jan 2026 12:00:00 +99999999999999999999", "unknown"),
        ("yesterday", "unknown"),
        (None, "unknown"),
    ],
)
def test_service_clock_is_compared_by_any_date_header(header: str | None, value: str) -> None:
    now = datetime(2026, 1, 5, 12, tzinfo=UTC)
    assert network._check_clock_skew(header, now).value == value


@pytest.mark.parametrize("reply", [ok_reply([]), ok_reply({}), (200, "application/json", b"{")])
def test_json_of_another_program_is_a_failed_finding(tmp_path: Path, reply: Reply) -> None:
    with serving(lambda *_: reply) as server:
        (found,) = network.service(Settings(server.url, tmp_path))
    assert (found.name, found.status, found.value) == ("service", "failed", "not Ratchet's")


def test_failed_probe_whose_output_is_no_utf8_is_a_finding(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nprintf 'caf\\351\\n' >&2\nexit 3\n")
    script.chmod(0o755)
    with probes.start_probe(probes.Probe("worker python", [str(script)], "worker", 20)) as answer:
        (found,) = answer().findings
    assert (found.value, found.detail) == ("no answer", f"{script}: caf\ufffd")


def test_worker_python_too_old_is_a_failed_finding(tmp_path: Path) -> None:
    """As Python 3.9 answers: it does not know -P."""
    script = tmp_path / "python3.9"
    script.write_text('#!/bin/sh\n[ "$1" = -c ] && echo 3.9.18 && exit 0\necho "unknown option -P" >&2\nexit 2\n')
    script.chmod(0o755)
    with probes.worker(str(script)) as answer:
        (found,) = answer().findings
    assert (found.status, found.value) == ("failed", "3.9.18") and "3.11" in str(found.cure)


SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) cat <<'END'
0, NVIDIA H200, 143771, 0, Default, [N/A], 580.65.06, GPU-a
1, NVIDIA H200, 143771, 90000, Default, Disabled, 580.65.06, GPU-b
2, NVIDIA H200, 143771, 0, Prohibited, Disabled, 580.65.06, GPU-c
3, NVIDIA H200, 143771, 0, Default, Enabled, 580.65.06, GPU-d
END
  ;;
  *) printf 'GPU-b\\nGPU-b\\n' ;;
esac
"""


def test_gpu_findings_are_read_from_nvidia_smi_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is a stand-in: its rows have the documented form of ``--format=csv,noheader,nounits``."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert subprocess.run(["nvidia-smi", "--query-gpu=x"], capture_output=True).stdout.count(b"H200") == 4
    free, busy, closed, cut = findings_without_torch()
    assert (free.status, free.value) == ("ok", "NVIDIA H200, 143771 of 143771 MiB free")
    assert busy.status == "warning" and "2 processes hold 90000 MiB" in str(busy.detail)
    assert closed.status == "failed" and closed.cure == "sudo nvidia-smi -i 2 -c DEFAULT"
    assert cut.status == "warning" and "MIG" in str(cut.detail)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert query_smi() == []


def test_doctor_summary_line_counts_findings_by_status(capsys: pytest.CaptureFixture[str]) -> None:
    slow, open_ = warning("disk", "slow", cure="another"), not_checked("service", "several run", cure="name one")
    for findings, words in (
        ([slow], "1 check: 1 warning"),
        ([ok("a", "yes"), slow, slow, open_], "4 checks: 2 warnings, 1 not checked"),
        ([ok("a", "yes"), ok("b", "yes")], "2 checks: all ok"),
    ):
        doctor._summary(findings)
        assert capsys.readouterr().err.splitlines() == [words]


def test_exactness_without_hook_option_proves_every_hook_that_needs_no_code_of_the_user() -> None:
    assert set(doctor._checked_hooks([])) == HOOKS.keys() - {"custom"}
    with pytest.raises(typer.BadParameter, match="--hook custom: available are allreduce, "):
        doctor._checked_hooks(["custom"])


def test_exactness_waits_as_long_as_jobs_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The client is a stand-in for a slow machine: one more job ends at each poll, and together they exceed the time limit."""
    proofs = [exactness.Proof(name, "cpu", "here", 2, f"{name}-a", f"{name}-b", struck=True) for name in ("one", "two")]
    ids = [job for proof in proofs for job in (proof.undisturbed, proof.killed)]
    looks = itertools.count()

    def jobs() -> list[SimpleNamespace]:
        ended = next(looks)
        return [SimpleNamespace(id=job, phase=SUCCEEDED if i < ended else RUNNING) for i, job in enumerate(ids)]

    monkeypatch.setattr(exactness, "TIMEOUT_SECONDS", 0.8)
    client: Any = SimpleNamespace(jobs=jobs)
    with Progress() as progress:
        found = exactness._wait_until_ended(client, HomePaths(tmp_path), proofs, progress)
    assert [found[job].phase for job in ids] == [SUCCEEDED] * 4


def test_doctor_warns_about_a_network_file_system_only_if_the_database_is_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type is a stand-in: no NFS server runs here."""
    monkeypatch.setattr(disk, "file_system", lambda _place, _mountinfo: "nfs4")
    with_sqlite = {one.name: one for one in disk.probe(tmp_path, sqlite=True)}
    assert with_sqlite["file system"].status == "warning" and "PostgreSQL" in str(with_sqlite["file system"].cure)
    with_postgres = {one.name: one for one in disk.probe(tmp_path, sqlite=False)}
    assert (with_postgres["file system"].status, with_postgres["file system"].value) == ("ok", "nfs4")
    assert with_sqlite.keys() - with_postgres.keys() == {"sqlite"}
