"""``make bench ONLY=checkpoint`` prints what its readers look for, refuses where there is no room, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import checkpoint_steps, checkpoint_tables
from benchmarks.checkpoint_jobs import CYCLE, Setup, measure
from benchmarks.checkpoint_room import available, insist
from examples.demo.processes import Service, living
from tests.support.forked_benchmarks import ForkedService
from tests.support.full_matrix import FULL, full

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 240.0  # seconds
FEW = 200  # steps between two saves of Ratchet's, for two other ways
SHORT = r"-?\d+\.\d{2} \[-?\d+\.\d{2}, -?\d+\.\d{2}\]"
FIGURE = r"\d+\.\d{3} \[\d+\.\d{3}, \d+\.\d{3}\]"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    found = ForkedService(tmp_path_factory.mktemp("home"), "--cpu-slots", "10")
    try:
        found.start()
        yield found
    finally:
        found.stop()
    assert not living(found.home)


@full
@pytest.mark.slow
def test_stall_table_has_every_way_to_save_and_a_verdict_per_aim(
    running: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = ("torch.save", checkpoint_tables.LIMIT)
    beside = measure(running, Setup(1, 1, rounds=2, ways=ways, way_rounds=1, restores=1, cycle=FEW), tmp_path)
    blocking = measure(running, Setup(1, 1, rounds=1, staging="blocking", cycle=FEW), tmp_path)
    checkpoint_tables.stalls(beside, blocking)
    lines = capsys.readouterr().out.splitlines()
    for way, rounds in (
        ("Ratchet, overlapped", 2),
        ("Ratchet, blocking, no steps", 1),
        ("torch.save", 1),
        ("limit: copy", 2),
    ):
        line = next(text for text in lines if text.startswith(way))
        assert re.search(rf"{way}\D* {rounds} .*{SHORT} .*{SHORT}", line), line
    aims = [text for text in lines if re.search(rf"\d\.\d\d +{SHORT}: (met|not met)", text)]
    assert any(re.match(rf"raw read, from the disk +\d.* {SHORT}", text) for text in lines)
    assert len(aims) == 9 and any("a plain copy and write in a thread" in text for text in aims)
    assert [text.startswith("  beside small steps") for text in lines].count(True) == 2  # Ratchet's, the limit's
    assert any(re.search(r"the trial of its first step: \d+ ms", text) for text in lines)
    assert any(re.search(rf"durable, .*; x O_DIRECT write {SHORT}$", text) for text in aims)
    assert [text for text in lines if text.startswith("  ran 1 MB, 1 rank")], "who waits sees each job"
    assert beside.nbytes >= 1_000_000 and beside.tensors == 528
    assert list(tmp_path.glob("tmp*")) == [], "what was saved is gone"
    assert not list(running.home.glob("jobs/*/checkpoints/*")), "and Ratchet's checkpoints are"
    assert len(beside.busy_cores) == 4 and min(beside.busy_cores) > 0


@full
@pytest.mark.slow
def test_measured_stall_is_at_least_the_stall_reported_by_ratchet(running: Service, tmp_path: Path) -> None:
    """The boundary, the hooks of the buckets and ``optimizer.step()``: a wait that is left out would flatter."""
    found = measure(running, Setup(10, 2, rounds=2, cycle=FEW), tmp_path)
    for way in (checkpoint_tables.BESIDE, checkpoint_tables.BARE):
        saves = found.saves[way]
        for stall, told in zip(saves.stall, saves.told, strict=True):
            assert told is not None and told <= stall + 1e-3, (way, stall, told)
        assert all(cpu > 0 for cpu in saves.cpu) or way == checkpoint_tables.BESIDE  # there it is a difference


@pytest.mark.slow
def test_step_table_compares_checkpoint_every_step_with_none(
    running: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"width": 16, "layers": 1, "train_bytes": 20_000}
    tiny = checkpoint_steps.Size(before=1, count=2, pairs=3, task=task, ranks=2 if FULL else 1)
    checkpoint_steps.table(running, tmp_path, {"tiny": tiny})
    lines = capsys.readouterr().out.splitlines()
    for name in ("tiny", "  in memory"):
        line = next(text for text in lines if text.startswith(name))
        assert re.search(rf"{name} +{FIGURE} +{FIGURE} .* (met|not met)", line), line
    assert list(tmp_path.iterdir()) == []


def test_benchmark_without_enough_memory_or_disk_is_refused_before_start(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4000000 kB\nMemAvailable: 2000000 kB\n")
    assert available(meminfo) == 2_048_000_000
    insist([Setup(50, 1, 1)], tmp_path, memory=meminfo)
    with pytest.raises(
        SystemExit, match=r"1000 MB, 4 ranks, overlapped: needs about .* GB memory, and 2.0 GB are free"
    ):
        insist([Setup(50, 1, 1), Setup(1000, 4, 1)], tmp_path, memory=meminfo)
    meminfo.write_text(f"MemAvailable: {1 << 50} kB\n")
    with pytest.raises(SystemExit, match="on the disk of"):
        insist([Setup(10**9, 1, 1)], tmp_path, memory=meminfo)
    staged = Setup(50, 1, 1, ways=("dcp.async_save, process, shared stager",))
    with pytest.raises(SystemExit, match=r"in .*/none"):
        insist([staged], tmp_path, memory=meminfo, shared=tmp_path / "none")


@full
@pytest.mark.slow
def test_interrupted_checkpoint_benchmark_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    """Two ranks, with DCP's processes. By SIGTERM, for which it has a handler; Ctrl-C raises by itself."""
    sizes = {"PARTS": "stalls", "MB": "5", "ROUNDS": "50", "RANKS": "2", "BATCH": "1", "DIR": str(tmp_path)}
    variables = {**os.environ, **{f"RATCHET_BENCH_{name}": value for name, value in sizes.items()}}
    command = [sys.executable, "-m", "benchmarks", "--only", "checkpoint"]
    process = subprocess.Popen(command, cwd=_ROOT, env=variables, start_new_session=True)
    try:
        end = time.monotonic() + _PATIENCE
        while not list(tmp_path.glob(f"*/home/jobs/*/checkpoints/step-*{CYCLE}.*")):
            assert process.poll() is None and time.monotonic() < end, "no rank has saved"
            time.sleep(0.05)
        (folder,) = tmp_path.iterdir()
        process.send_signal(signal.SIGTERM)
        assert process.wait(_PATIENCE) != 0
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []
    assert not _naming(folder)


def _naming(folder: Path) -> list[str]:
    """Processes whose command line or environment names it, the test's own apart."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in text:
                found.append(entry.name)
    return found
