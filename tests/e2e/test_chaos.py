"""A few faults of ``make chaos``, which injects any number; and that it is by its seed what it is."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.chaos import chaos
from tests.support.chaos import faults
from tests.support.chaos.jobs import HOOKS, plans
from tests.support.chaos.planted_faults import PLANTED
from tests.support.chaos.run import Wanted
from tests.support.chaos.schedule import Log, Struck, draw_faults, read_log
from tests.support.chaos.world import Engine
from tests.support.fork_server import ROOT
from tests.support.full_matrix import full
from tests.support.server import processes_below, wait_for

FAULTS: dict[Engine, int] = {"sqlite": 12}
"""``make chaos`` injects half of its faults on PostgreSQL."""
SEED = int(os.environ.get("RATCHET_TEST_SEED", "11"))
PLANT = os.environ.get("RATCHET_TEST_PLANTED", "").split()
"""Names of planted faults that a run must find; a minute or two each."""


def wanted(count: int) -> Wanted:
    return Wanted(SEED, count, jobs=3, pace=0.6, pause=0.06, longest_stop=7.0)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", FAULTS)
def test_chaos_loses_no_job_runs_none_twice_and_all_end_exactly(tmp_path: Path, engine: Engine) -> None:
    """The disk is not filled here: that needs a mount of the run's own."""
    run, verdict, lines = chaos(tmp_path, engine, wanted(FAULTS[engine]))
    assert not verdict.breaches, "\n".join([*map(str, run.log.struck), *lines])
    assert run.tally.faults.total() == FAULTS[engine]
    assert verdict.ends.total() == 3
    assert verdict.identical == verdict.compared > 0
    assert verdict.tensors >= 5 * verdict.compared


@full
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signalled_chaos_run_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """While clients try again and again: the service that they ask is stopped. Nor a directory, but for SIGKILL."""
    log = tmp_path / "log"
    words = f"--engine sqlite --n 90 --jobs 30 --real 0 --pace 0.3 --only stop-rank --log {log}"
    command = [sys.executable, "-m", "tests.e2e.chaos", *words.split()]
    env = {
        k: v for k, v in os.environ.items() if not k.startswith("RATCHET_TEST_")
    }  # it has forking processes of its own
    place = tmp_path / "temporary"
    place.mkdir()
    process = subprocess.Popen(command, cwd=ROOT, env=env | {"TMPDIR": str(place)}, start_new_session=True)

    def struck() -> int:
        assert process.poll() is None
        told = Path(f"{log}.sqlite.jsonl")
        return told.read_text().count("stop-rank") - 1 if told.exists() else 0  # the header names it

    try:
        before = wait_for(struck, "a fault", 120)
        for pid in _services(place):
            os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: struck() > before + 4, "a job more for every three faults", 90)
        process.send_signal(number)
        assert process.wait(40) in (143, -signal.SIGKILL)
        wait_for(lambda: not processes_below(place), "all its processes to end", 20)
    finally:
        process.kill()
        process.wait(10)
        for pid in processes_below(place):
            os.kill(pid, signal.SIGKILL)
    assert number == signal.SIGKILL or not list(place.glob("ratchet-*"))


def _services(place: Path) -> list[int]:
    return [p for p in processes_below(place) if b"chaos.process" in Path(f"/proc/{p}/cmdline").read_bytes()]


@pytest.mark.skipif(not PLANT, reason="RATCHET_TEST_PLANTED names none")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PLANT)
def test_chaos_detects_planted_fault(tmp_path: Path, name: str) -> None:
    assert name in PLANTED
    _, verdict, _ = chaos(tmp_path, "postgresql", Wanted(SEED, 100, jobs=20), planted=name)
    assert verdict.breaches


def test_same_chaos_seed_gives_same_faults_and_plans(tmp_path: Path) -> None:
    weights = {name: weight for name, (_, weight) in faults.table("postgresql", disk=True).items()}
    first, again, other = (list(itertools.islice(draw_faults(seed, weights, 1.0), 400)) for seed in (1, 1, 2))
    assert first == again != other
    assert {draw.kind for draw in first} == set(weights)
    made = plans(1, 20, 5, tmp_path, 0.1)
    assert made == plans(1, 20, 5, tmp_path, 0.1) != plans(2, 20, 5, tmp_path, 0.1)
    assert [plan.kind for plan in made if plan.real] == list(HOOKS)


def test_chaos_log_is_read_back_for_replay(tmp_path: Path) -> None:
    log = Log({"seed": 3}, tmp_path / "log")
    struck = [Struck(0.5, 1, "kill-rank", "job 0 attempt 1 rank 0"), Struck(0.7, 0, "then", "the disk has room"),
              Struck(0.9, 4, "outage", "the relay", "closed for 1.0 s")]  # fmt: skip
    for one in struck:
        log.add(one)
    log.close()
    assert read_log(tmp_path / "log") == ({"seed": 3}, {1: struck[0], 4: struck[2]})


def test_replay_chooses_the_recorded_victim() -> None:
    among = ["job 1 attempt 1", "job 1 attempt 12", "job 2 attempt 1"]
    assert faults.choose_victim(among, 0.0, "job 1 attempt 12 rank 1") == among[1]
    assert faults.choose_victim(among, 0.0, "job 3 attempt 1 agent") is None
    assert [faults.choose_victim(among, pick, None) for pick in (0.0, 0.5, 0.99)] == among
