"""What a script has seeded counts, before its Session or behind it, without a service as in a job."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratchet_contract.exit_codes import EXIT_PREEMPTED
from ratchet_worker.state.rng import seed_all
from tests.support.full_matrix import full
from tests.support.launch import Job

SCRIPT = """
import json, os, random, signal, sys, time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

if sys.argv[1] == "import":
    torch.manual_seed(5)
from ratchet import Session, UserError

SEED = {"torch": torch.manual_seed, "numpy": np.random.seed, "random": random.seed}
DRAW = {"torch": lambda: torch.rand(1).item(), "numpy": np.random.rand, "random": random.random}


def seed(names):
    for name in names:
        SEED[name](5)


def train(directory, where, names):
    if where == "drawn":
        for name in names:
            DRAW[name]()
    if where == "before":
        seed(names)
    if where == "state":
        np.random.set_state(np.random.RandomState(5).get_state())
    if where == "refused":
        seed(names)
        if dist.is_initialized():  # the run before has left its own
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            Session(directory, seed=3)
        except UserError:
            dist.destroy_process_group()
    with Session(directory, seed=3) as session:
        if where == "behind":
            seed(names)
        found = {name: draw() for name, draw in DRAW.items()}
        net = torch.nn.Linear(1, 1)
        model = session.wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session.register(optimizer=optimizer)
        for _ in session.steps(2):
            for _ in range(500):
                random.random()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if "STOPPED" in os.environ:
                os.kill(os.getpid(), signal.SIGTERM)
                while not session.should_stop:
                    time.sleep(0.01)
    return found


if __name__ == "__main__":
    where, *names = sys.argv[1:]
    runs = 1 if "RATCHET_JOB_ID" in os.environ else 2
    Path("draws.json").write_text(json.dumps([train(f"run-{n}", where, names) for n in range(runs)]))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def start(place: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=place,
        env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def of_a_job(names: Sequence[str]) -> dict[str, float]:
    """What a rank draws that is seeded before its script, which seeds ``names``."""
    seed_all(3, 0)
    seeds: dict[str, Any] = {"torch": torch.manual_seed, "numpy": np.random.seed, "random": random.seed}
    for name in names:
        seeds[name](5)
    return {"torch": torch.rand(1).item(), "numpy": np.random.rand(), "random": random.random()}


def drawn(place: Path) -> Any:
    return json.loads((place / "draws.json").read_text())


@pytest.mark.parametrize(
    ("where", "names"),
    [
        pytest.param("before", (), marks=full),
        pytest.param("before", ("torch",), marks=full),
        pytest.param("behind", ("torch",), marks=full),
        pytest.param("before", ("numpy", "random"), marks=full),
        ("before", ("torch", "numpy", "random")),
        pytest.param("state", ("numpy",), marks=full),
        pytest.param("refused", ("torch", "numpy", "random"), marks=full),
    ],
)
def test_script_seeds_are_kept_and_unseeded_generators_are_seeded(
    place: Path, where: str, names: tuple[str, ...]
) -> None:
    done = start(place, where, *names)
    assert done.returncode == 0, done.stderr
    first, second = drawn(place)
    assert first == of_a_job(names)
    assert all(second[name] == first[name] for name in names or first)  # another run of the same process
    said = done.stderr.startswith(f"ratchet: {', '.join(names)}: seeded by the script before Session(seed=3)")
    assert said == (where != "behind" and names != ()), done.stderr


@full
def test_torch_seed_set_before_importing_ratchet_is_kept(place: Path) -> None:
    done = start(place, "import")
    assert done.returncode == 0, done.stderr
    assert drawn(place)[0] == of_a_job(["torch"])


@full
def test_unseeded_draws_before_the_session_are_named_at_resume(place: Path) -> None:
    stopped = start(place, "drawn", "torch", "numpy", STOPPED="yes")
    assert stopped.returncode == EXIT_PREEMPTED, stopped.stderr
    resumed = start(place, "drawn", "torch", "numpy")
    assert resumed.returncode == 0, resumed.stderr
    assert drawn(place)[0] == of_a_job([])
    assert "what was drawn from torch, numpy before Session() without a seed" in resumed.stderr, resumed.stderr


def test_script_seeds_are_kept_in_a_job(place: Path) -> None:
    spec = {
        "script": ["train.py", "before", "torch"],
        "code": {"path": str(place)},
        "seed": 3,
        "world": {"ranks_per_node": 1, "device": "cpu"},
    }
    job = Job(place / "home", spec, place)
    try:
        attempt = job.launch()
        attempt.wait()
        assert drawn(job.paths.work_dir)[0] == of_a_job(["torch"]), attempt.logs()
    finally:
        job.close()
