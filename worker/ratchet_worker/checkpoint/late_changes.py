"""Detects what a script changes after ``checkpoint()`` in the same loop body: the checkpoint lacks these changes, so a resume
from it is not exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ratchet_hooks.torch_compat import version_of
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.state.live_memory import address
from ratchet_worker.state.model import MODEL
from ratchet_worker.state.object_walk import SMALL
from ratchet_worker.state.snapshot import Snapshot, digest


class LateChanges:
    """Detects what changes on one rank after ``checkpoint()``. Create it when ``checkpoint()`` has saved ``step``."""

    def __init__(self, state: JobState, step: int) -> None:
        self.step = step
        self._state = state
        self._snapshot = state.capture()  # holds the tensors, so that their memory is not reused
        self._marks = _marks(self._snapshot)

    def changed_components(self) -> list[str]:
        """Return the sorted names of the components that seem to have changed since this object was created, except harmless
        ones."""
        now = self._state.capture()
        marks = _marks(now)
        names = {
            name.partition("/")[0] for name in {**self._marks, **marks} if self._marks.get(name) != marks.get(name)
        }
        states = self._snapshot.state, now.state
        names |= {name for name in {**states[0], **states[1]} if states[0].get(name) != states[1].get(name)}
        return sorted(names - self._harmless_components())

    @contextmanager
    def ignoring_evaluation(self) -> Iterator[None]:
        """Context manager around an evaluation: changes of parameters and buffers that are undone by its end are not counted."""
        before = self._model_marks_and_digests()
        try:
            yield
        finally:
            for name, (mark, value) in self._model_marks_and_digests().items():
                # ``preserving_state`` puts values back, which torch counts as a change
                if before.get(name) == (self._marks.get(name), value):
                    self._marks[name] = mark

    def _model_marks_and_digests(self) -> dict[str, tuple[Any, Any]]:
        """Return, by name, the mark (see ``_marks``) and the ``_digest`` of each parameter and buffer as it is now."""
        now = self._state.capture()
        tensors = {**now.shared, **now.private}
        return {
            name: (mark, _digest(tensors[name]))
            for name, mark in _marks(now).items()
            if name.startswith((f"{MODEL}/", "buffers/"))
        }

    def _harmless_components(self) -> set[str]:
        """Return the components whose changes on this rank have no effect. These are the buffers if DDP replaces them by rank
        0's before each forward pass; otherwise there are none."""
        ddp = self._state.require_wrapped()[0]
        return {"buffers"} if ddp.broadcast_buffers and self._state.rank != 0 else set()


def late_change_message(step: int, names: Sequence[str]) -> str:
    """Return the message for the user about changes after ``checkpoint()``. ``names``: the changed components."""
    return (
        f"{', '.join(name.removeprefix('user:') for name in names)} changed after checkpoint() in the same loop body, so the "
        f"checkpoint of step {step} lacks it: call checkpoint() last"
    )


def early_checkpoint_message(step: int, names: Sequence[str]) -> str:
    """Return the message for a ``checkpoint()`` that is called when the next step has begun. ``names``: components that had
    advanced."""
    moved = ", ".join(name.removeprefix("user:") for name in names)
    return (
        f"checkpoint() saved step {step} when the next one had begun: {moved} had advanced. A resume does the body again, and "
        "advances once more: call checkpoint() last"
    )


def unfinished_body_message(step: int, attempt: int) -> str:
    """Return the message for an attempt that ended before the end of the loop body in which ``checkpoint()`` saved ``step``."""
    return (
        f"attempt {attempt} did not reach the end of the loop body in which checkpoint() saved step {step}, so the checkpoint "
        "lacks what the rest of the body changes: call checkpoint() last"
    )


def _marks(snapshot: Snapshot) -> dict[str, Any]:
    """Return a mark for each tensor of ``snapshot``, by name. If a later mark differs, the tensor seems to have changed."""
    tensors: Mapping[str, torch.Tensor] = snapshot.shared
    found = {name: (address(tensor), _mark(tensor)) for name, tensor in tensors.items()}
    return {**found, **{name: _mark(tensor) for name, tensor in snapshot.private.items()}}


def _mark(tensor: torch.Tensor) -> Any:
    """Return a value that usually differs after a change of the tensor. For a small CPU tensor it has a digest, otherwise
    torch's count of in-place changes."""
    if tensor.is_cpu and tensor.nbytes <= SMALL:
        return _digest(tensor)
    return tensor.shape, tensor.dtype, version_of(tensor)


def _digest(tensor: torch.Tensor) -> Any:
    """Return shape and dtype of a tensor with a digest of its elements."""
    return tensor.shape, tensor.dtype, digest([tensor])
