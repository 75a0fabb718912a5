"""A script's own ``TrainData`` that moves to the next epoch only when its pass ends, stopped after an epoch's last batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ratchet_contract.exit_codes import EXIT_PREEMPTED
from tests.support.fork_server import RANKS

SCRIPT = """
import json, os, signal, time
from pathlib import Path

import torch
from torch import nn

from ratchet import Session

LENGTH, STOP_AT = int(os.environ["LENGTH"]), int(os.environ.get("STOP_AT", 0))


class Own:
    steps_per_epoch, exact = LENGTH, True

    def __init__(self):
        self.epoch = self.position = 0

    def __iter__(self):
        while self.position < LENGTH:
            self.position += 1
            yield torch.tensor([[float(self.epoch), float(self.position)]])
        self.epoch += 1
        self.position = 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


def train():
    taken = []
    try:
        with Session("run", seed=3) as session:
            net = nn.Linear(2, 1)
            model = session.wrap(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            session.register(optimizer=optimizer, data=Own())
            batches = session.batches()
            for step in session.steps(9):
                x = next(batches)
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                taken.append(x.tolist())
                if step + 1 == STOP_AT:
                    os.kill(os.getpid(), signal.SIGTERM)
                    while not session.should_stop:
                        time.sleep(0.01)
        taken.append(net.weight.tolist())
    finally:
        Path(os.environ["OUTPUT"]).write_text(json.dumps(taken))


train()
"""


def run(place: Path, output: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (place / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "LENGTH": "4", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return RANKS.run([sys.executable, "train.py"], cwd=place, env={**environment, "OUTPUT": output, **environ})


def taken(place: Path, output: str) -> list[Any]:
    found: list[Any] = json.loads((place / output).read_text())
    return found


def test_run_stopped_after_last_batch_of_an_epoch_continues_with_the_next_epoch(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    done = run(whole, "taken")
    assert done.returncode == 0, done.stderr
    for stop_at, output in (("4", "first"), ("8", "second")):
        stopped = run(cut, output, STOP_AT=stop_at)
        assert stopped.returncode == EXIT_PREEMPTED, stopped.stderr
    resumed = run(cut, "third")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed exactly from step 8" in resumed.stderr, resumed.stderr
    assert taken(cut, "first") + taken(cut, "second") + taken(cut, "third") == taken(whole, "taken")


def test_data_without_batches_are_refused_also_directly_after_a_restore(tmp_path: Path) -> None:
    assert run(tmp_path, "first", STOP_AT="4").returncode == EXIT_PREEMPTED
    for directory in ("resumed", "begun"):
        if directory == "begun":
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        empty = run(tmp_path, "second", LENGTH="0")
        assert "the data gave no batch in a whole epoch" in empty.stderr, empty.stderr
        assert empty.returncode != 0 and taken(tmp_path, "second") == []
