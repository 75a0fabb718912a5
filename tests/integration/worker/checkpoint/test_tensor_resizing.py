"""User code that frees and resizes tensors while a save reads them: a save may fail by name, the training never ends for it.

``RATCHET_TEST_RESIZES``: steps with a save each (40).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ratchet_contract.phases import Cause
from ratchet_store.read.checkpoint_reader import CheckpointReader
from tests.support.full_matrix import full
from tests.support.launch import Attempt, Job

STEPS = int(os.environ.get("RATCHET_TEST_RESIZES", "40"))
TASK = '''
import random, time
import numpy as np
import torch, xxhash
from torch import nn
from ratchet_worker.checkpoint import host_copy
from ratchet_worker.state import live_memory
from ratchet_worker.checkpoint.checkpointer import Checkpointer
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts

SIZES = (20_000, 300_000, 1_000_000)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        image = torch.randn(32, 32, 9, 9).to(memory_format=torch.channels_last)  # not row-major
        self.large = nn.ParameterList([nn.Parameter(t) for t in (*map(torch.randn, SIZES), image)])

    def forward(self, x):
        return sum((p * x[0, 0]).sum() for p in self.large)


def digests(model):
    found = {f"shared/model/{name.removeprefix('module.')}": p for name, p in model.named_parameters()}
    return {name: xxhash.xxh3_128_hexdigest(p.detach().clone().numpy().tobytes()) for name, p in found.items()}


class Resizing:
    """``record``: a file that gets the digests of the state at every boundary. ``beside``: Ratchet goes on copying beside steps,
    where it would copy before them after the first failure. ``unsafe``: what Ratchet must not do, as a control: the saving
    threads read the memory themselves."""

    def __init__(self, record, steps, beside=True, unsafe=False):
        self.record, self.steps, self.step = record, steps, 0
        self.draw = random.Random(7)
        if beside:
            Checkpointer._copy_before_steps = lambda checkpointer, reason, note: None
        if unsafe:
            host_copy._copy_bytes = lambda memory, target, reader: np.copyto(target, memory)
            live_memory.SafeReader.blocks = lambda reader, memory: [memory.copy()]

    def build(self, context):
        torch.manual_seed(1)
        self.rank = context.rank
        net = Net()
        data = TrainLoader(torch.randn(64, 1), batch_size=8, seed=3, rank=context.rank, world_size=context.world_size)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        return Parts(model=net, optimizer=self.optimizer, train=data, total_steps=self.steps)

    def loss(self, model, batch):
        self.step += 1
        parameters = list(model.parameters())
        if self.step > 2 and self.step % 3:  # the first two are the trial; three failures in a row would end the attempt
            tensors = [*parameters, *(self.optimizer.state[p]["momentum_buffer"] for p in parameters)]
            with torch.no_grad():
                for tensor in self.draw.sample(tensors, 2):
                    self.draw.choice((self.freed, self.grown, self.replaced))(tensor)
        if self.rank == 0 and self.step > 1:
            with open(self.record, "a") as file:
                for name, digest in digests(model).items():
                    print(self.step - 1, name, digest, file=file)
        return model(batch) / 1000

    def pause(self):
        time.sleep(self.draw.choice((0, 0, 0.0003, 0.001, 0.004)))

    def freed(self, tensor):
        kept, storage = tensor.detach().clone(), tensor.untyped_storage()
        nbytes = storage.nbytes()
        self.pause()
        storage.resize_(0)
        self.pause()
        storage.resize_(nbytes)
        tensor.copy_(kept)

    def grown(self, tensor):
        self.pause()
        tensor.untyped_storage().resize_(2 * tensor.nbytes)

    def replaced(self, tensor):
        self.pause()
        tensor.data = tensor.data.clone()
'''


def run(home: Path, steps: int, **arguments: Any) -> Attempt:
    code = home / "code"
    code.mkdir(parents=True)
    (code / "resizing.py").write_text(TASK)
    spec = {
        "task": {
            "entrypoint": "resizing:Resizing",
            "args": {"record": str(home / "record"), "steps": steps, **arguments},
        },
        "world": {"ranks_per_node": 2, "device": "cpu"},
        "checkpoint": {"every_steps": 1, "keep_last": 40, "staging": "overlapped"},
    }
    return Job(home / "job", spec, code, job_id="job", afresh=True).launch()


@pytest.fixture
def returned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library gives memory of 64 KiB and more back to the system as soon as it is freed: a read of it ends a process."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(64 << 10))


@full
@pytest.mark.timeout(120 + 2 * STEPS)
@pytest.mark.usefixtures("returned_at_once")
def test_tensor_freed_during_save_fails_the_save_but_not_the_training(tmp_path: Path) -> None:
    attempt = run(tmp_path, STEPS)
    try:
        result = attempt.wait(60 + STEPS)
        assert result.cause is Cause.COMPLETED, attempt.logs()
        failed = {m.step: m.error for m in attempt.messages(kind="checkpoint_failed")}
        saved = {int(name[5:17]): attempt.job.paths.checkpoints / name for name in attempt.job.checkpoints()}
    finally:
        attempt.close()
    assert not failed.keys() & saved.keys() and len(saved) == min(40, STEPS - len(failed))
    print(f"{STEPS} saves: {len(failed)} failed by name, the newest {len(saved)} of the others compared")
    assert STEPS // 10 <= len(failed) <= STEPS * 2 // 3, f"{len(failed)} saves failed"
    # Where the read was between the allocation and the fill of an emptied storage, the comparison of the replicas notices.
    named = re.compile(
        r"(model|optimizer)/large\.\d\S* (was (resized|changed) before it was copied|of rank \[1\] differs)"
    )
    assert [error for error in failed.values() if not named.search(error)] == []
    right = {
        (int(step), name): digest
        for step, name, digest in map(str.split, (tmp_path / "record").read_text().splitlines())
    }
    for step in saved.keys() - {STEPS}:
        tensors = CheckpointReader(saved[step]).tensors("shared/model/")
        found = {(step, name): xxhash.xxh3_128_hexdigest(tensor.data) for name, tensor in tensors.items()}
        assert found == {key: right[key] for key in found}, f"step {step}"


@pytest.mark.usefixtures("returned_at_once")
def test_save_failed_by_freed_tensor_switches_to_blocking_staging(tmp_path: Path) -> None:
    attempt = run(tmp_path, 30, beside=False)
    try:
        assert attempt.wait(100).cause is Cause.COMPLETED, attempt.logs()
        failed = sorted(m.step for m in attempt.messages(kind="checkpoint_failed"))
        notes = [m.message for m in attempt.messages(kind="note") if m.type == "staging-blocking"]
        assert failed and len(attempt.job.checkpoints()) == 30 - len(failed)
    finally:
        attempt.close()
    assert (
        len(notes) == 1 and f"the save of step {failed[0]} failed" in notes[0] and "checkpoint.staging" in notes[0]
    ), notes
    assert len(failed) == 1, f"saves failed at steps {failed}: after the first no rank copies beside a step"


@pytest.mark.usefixtures("returned_at_once")
@full
def test_control_with_unsafe_reads_of_freed_memory_is_killed(tmp_path: Path) -> None:
    attempt = run(tmp_path, 300, unsafe=True)
    try:
        assert attempt.wait(100).cause is Cause.RANK_KILLED, attempt.logs()
        assert (
            "SIGSEGV" in attempt.logs()
            or "signal 11" in attempt.logs().lower()
            or "-11" in attempt.paths.result_file.read_text()
        )
    finally:
        attempt.close()
