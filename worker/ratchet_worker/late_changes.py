"""What a script changes behind ``checkpoint()`` in the same loop body. The undisturbed run has it, the checkpoint has not: the
checkpoint is marked, and a resume from it is not exact. The step counter keeps that a body goes on behind ``checkpoint()``: where
the process ends there, the attempt that resumes from the checkpoint marks it.

The state is captured when ``checkpoint()`` has saved it, and at the end of the body. Both are views: compared are the values of
what is small, and of the rest torch's count of in-place changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ratchet_hooks.torch_compat import version_of
from ratchet_worker.job_state import JobState
from ratchet_worker.live_memory import address
from ratchet_worker.model_state import MODEL
from ratchet_worker.object_walk import SMALL
from ratchet_worker.rng import forked
from ratchet_worker.snapshot import Snapshot, digest


class LateChanges:
    """Of one rank, from the end of a ``checkpoint()`` on. ``step``: the one that is saved."""

    def __init__(self, state: JobState, device: torch.device, step: int) -> None:
        self.step = step
        self._state, self._device = state, device
        self._snapshot = self._captured()  # holds the tensors, so that no other gets their memory
        self._marks = _marks(self._snapshot)

    def found(self) -> list[str]:
        """Names of the components that are others now."""
        now = self._captured()
        marks = _marks(now)
        names = {
            name.partition("/")[0] for name in {**self._marks, **marks} if self._marks.get(name) != marks.get(name)
        }
        states = self._snapshot.state, now.state
        names |= {name for name in {**states[0], **states[1]} if states[0].get(name) != states[1].get(name)}
        return sorted(names - self._without_effect())

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Around an evaluation, which puts parameters and buffers back bit for bit. Torch counts that as a change; it is none."""
        before = self._of_the_model()
        try:
            yield
        finally:
            after = self._of_the_model()
            self._marks |= {name: mark for name, mark in after.items() if self._marks.get(name) == before.get(name)}

    def _of_the_model(self) -> dict[str, Any]:
        marks = _marks(self._captured())
        return {name: mark for name, mark in marks.items() if name.startswith((f"{MODEL}/", "buffers/"))}

    def _captured(self) -> Snapshot:
        with forked(self._device):  # what a state_dict() draws leaves no trace
            return self._state.capture()

    def _without_effect(self) -> set[str]:
        """Every forward begins with rank 0's buffers, where DDP broadcasts them."""
        ddp = self._state.hook_or_refuse()[0]
        return {"buffers"} if ddp.broadcast_buffers and self._state.rank != 0 else set()


def sentence(step: int, names: Sequence[str]) -> str:
    """What is wrong with the checkpoint of ``step``, and what to do."""
    return (
        f"{', '.join(name.removeprefix('user:') for name in names)} changed behind checkpoint() in the same loop body, so the "
        f"checkpoint of step {step} lacks it: call checkpoint() last"
    )


def before_work(step: int, names: Sequence[str]) -> str:
    """The same of a ``checkpoint()`` between the beginning of a body and the step's work."""
    moved = ", ".join(name.removeprefix("user:") for name in names)
    return (
        f"checkpoint() saved step {step} when the next one had begun: {moved} had moved on. A resume does the body again, and "
        "moves on once more: call checkpoint() last"
    )


def cut_off(step: int, epoch: int) -> str:
    """The same where nobody has seen the end of the body."""
    return (
        f"attempt {epoch} has not come to the end of the loop body in which checkpoint() saved step {step}, so the checkpoint "
        "lacks what the rest of the body changes: call checkpoint() last"
    )


def _marks(snapshot: Snapshot) -> dict[str, Any]:
    tensors: Mapping[str, torch.Tensor] = snapshot.shared
    found = {name: (address(tensor), _mark(tensor)) for name, tensor in tensors.items()}
    return {**found, **{name: _mark(tensor) for name, tensor in snapshot.private.items()}}


def _mark(tensor: torch.Tensor) -> Any:
    form = tensor.shape, tensor.dtype
    if tensor.is_cpu and tensor.nbytes <= SMALL:
        return *form, digest([tensor])
    return *form, version_of(tensor)
