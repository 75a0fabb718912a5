"""SIGKILL at random instants while a process saves: no acknowledged checkpoint is lost, nothing half-written counts. The control
loses: ``torch.save`` over one file.

``RATCHET_TEST_KILLS`` sets the number of kills (default 25; the published figure is of 1000).
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_store.read.find_base import find_base
from ratchet_store.retention.attempt_retention import Keeper
from ratchet_store.retention.delete import sweep
from tests.support.checkpoints import list_names, make_checkpoint

KILLS = int(os.environ.get("RATCHET_TEST_KILLS", "25"))
SCALE = 300  # 630 kB of weights: a kill falls into the writing of bytes often enough
DEADLINE = 60.0


def _save_for_ever(checkpoints: Path, attempt: int, parent: Base, acknowledge: int) -> None:
    """Save, acknowledge, retain, as a worker of attempt ``attempt`` does; one byte per committed step."""
    keeper = Keeper(checkpoints, CheckpointSpec(keep_last=2), attempt)
    while True:
        manifest = make_checkpoint(checkpoints, parent.step + 1, attempt, parent=parent, scale=SCALE)
        parent = manifest.base
        os.write(acknowledge, b".")
        keeper.on_committed(manifest)


def _save_in_place(path: Path, acknowledge: int) -> None:
    """What most scripts do. numpy counts: torch's own threads do not come along when a process is forked."""
    step, weight = 0, np.zeros(158_000, np.float32)
    while True:
        step += 1
        weight[:] = step
        torch.save({"step": step, "weight": torch.from_numpy(weight)}, path)
        os.write(acknowledge, b".")


def _run_and_kill(save: Callable[[int], None], delay: float) -> int:
    """Start a saver, kill it ``delay`` seconds after its first acknowledgement; returns how many it has given."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        try:
            os.close(reading)
            save(writing)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert select.select([reading], [], [], DEADLINE)[0], "the first checkpoint took too long"
        time.sleep(delay)  # the point in time is the test's subject: any is right
    finally:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    acknowledged = 0
    while data := os.read(reading, 65536):
        acknowledged += len(data)
    os.close(reading)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the saver ended by itself"
    return acknowledged


def test_no_acknowledged_checkpoint_is_lost_to_a_kill(tmp_path: Path) -> None:
    source = random.Random(7)
    unfinished, ahead = 0, 0
    for kill in range(1, KILLS + 1):
        root = tmp_path / str(kill)
        save = partial(_save_for_ever, root / "checkpoints", 1, Base())
        acknowledged = _run_and_kill(save, source.uniform(0, 0.03))
        manifest, moved = find_base(root / "checkpoints", root / "quarantine", [Segment(attempt=1, after_step=0)])
        assert manifest is not None and moved == []
        assert manifest.step in (acknowledged, acknowledged + 1)
        ahead += manifest.step > acknowledged
        unfinished += bool(sweep(root / "checkpoints", dead_attempts={1}))
        assert 1 <= len(list_names(root / "checkpoints")) <= 3
        shutil.rmtree(root)
    print(f"{KILLS} kills: 0 acknowledged steps lost, {ahead} more were there, {unfinished} saves were cut")
    assert unfinished > KILLS // 5, "hardly any kill fell into a save: the test does not test"


def test_in_place_torch_save_control_loses_acknowledged_steps(tmp_path: Path) -> None:
    source, lost, path = random.Random(7), 0, tmp_path / "model.pt"
    for _ in range(KILLS):
        acknowledged = _run_and_kill(partial(_save_in_place, path), source.uniform(0, 0.03))
        try:
            found = torch.load(path, weights_only=True)
            lost += found["step"] < acknowledged or (found["weight"].numpy() != found["step"]).any()
        except Exception:  # of many kinds
            lost += 1
    print(f"{KILLS} kills of torch.save in place: {lost} times nothing could be loaded")
    assert lost > KILLS // 10, "the harness does not tell a good way to save from a bad one"
