"""The benchmarks run and print what their readers look for. How fast anything is, they say, not this."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import startup, step
from benchmarks.stats import estimate, machine
from examples.demo.processes import Service, living
from tests.support.forked_benchmarks import ForkedService
from tests.support.full_matrix import full
from tests.support.server import processes_below, wait_for

FIGURE = r"(\d+\.\d{3}) \[(\d+\.\d{3}), (\d+\.\d{3})\]"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = ForkedService(tmp_path_factory.mktemp("home"))
    try:
        service.start()
        yield service
    finally:
        service.stop()
        assert not living(service.home)


def test_estimate_interval_contains_the_median_and_is_deterministic() -> None:
    values = [1.0, 1.1, 0.9, 1.2, 0.8, 5.0]
    found = estimate(values)
    assert found.low <= found.median <= found.high < 5.0
    assert found.median == 1.05 and found.count == 6
    assert found == estimate(values)
    assert "cores" in machine()


@pytest.mark.slow
def test_step_benchmark_prints_ratio_with_interval(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = step.Size(width=16, depth=2, batch=4, block=2, pairs=4)
    step.table(service, tmp_path, {"tiny": size}, ["powerSGD"])
    lines = capsys.readouterr().out.splitlines()
    line = next(text for text in lines if text.startswith("tiny powerSGD"))
    assert any(re.search(r"fingerprint of a step: [\d.]+ \[[\d.]+, [\d.]+\] us, [\d.]+%", text) for text in lines), (
        lines
    )
    figures = re.findall(FIGURE, line)
    assert len(figures) == 3, "a ratio, of CPU time too, and its control"
    assert all(0 < float(low) <= float(median) <= float(high) for median, low, high in figures)


def test_walk_benchmark_prints_share_of_a_step_and_ratio() -> None:
    """In a process of its own: the walk looks at the benchmarks' modules, which other tests of this process have changed."""
    environ = {**os.environ, "RATCHET_BENCH_PAIRS": "2"}
    first, second = subprocess.check_output(
        [sys.executable, "-m", "benchmarks.walk"], env=environ, text=True
    ).splitlines()
    assert re.fullmatch(r"walk, averaged over .*, % of a step: \d.*; \d.* ms for 622 modules", first), first
    assert re.fullmatch(r"before an evaluation, ratio to a step: \d.* ms", second), second


@full
@pytest.mark.slow
def test_startup_benchmark_prints_control_plane_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    startup.control_plane(tmp_path, 1)
    assert "libtorch in its maps: no" in capsys.readouterr().out


@full
@pytest.mark.slow
def test_interrupted_benchmark_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    """With its service up, and a rank that is about to train: torch's compiler makes a directory when it is imported."""
    environ = {**os.environ, "TMPDIR": str(tmp_path), "RATCHET_BENCH_SIZES": "small"}
    command = [sys.executable, "-m", "benchmarks", "--only", "step"]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_for(lambda: list(tmp_path.glob("**/torchinductor*")), "a rank", 90)
            assert len(processes_below(tmp_path)) >= 2  # this command's, its service, the agent
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode != 0 and "KeyboardInterrupt" in said, said
    left = processes_below(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [] and list(tmp_path.iterdir()) == []
