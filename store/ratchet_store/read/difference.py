"""Describe the differences of two checkpoints as messages, causes before consequences, with advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ratchet_contract.checkpoint.manifest import SHARED_PREFIX
from ratchet_contract.plural import join_first
from ratchet_store.read.compare import Comparison, StateDifference, TensorComparison, component_of

_ORDER: Final = (
    "facts", "data", "data_generators", "rng", "attributes", "user", "scaler", "scheduler", "modules", "hook", "buffers",
    "gradients", "optimizer", "model",
)  # fmt: skip
"""Components of a checkpoint, causes before consequences; ``user``: what a script has registered under its own name."""
_ADVICE: Final = {
    "facts": "they ran on other software, hardware or settings: other differences are to be expected",
    "data": "the data were read to another position, or in another order: register the object that yields the batches "
    "(TrainLoader, or a TrainStream with state_dict)",
    "data_generators": "a generator that belongs to the data is at another position: draw from torch's, numpy's or Python's "
    "process-wide ones, or register it",
    "rng": "a process-wide generator was drawn from more often in one of them: look for draws that not every attempt repeats, "
    "such as in the set-up, behind a condition on time, or in a callback",
    "attributes": "an attribute of the model, an optimizer or the data set, or a variable of a module, has another value, and "
    "training may read it: register the object (session.keep(name=...) for a variable), or "
    "session.ignore(path, reason) if training does not depend on it",
    "user": "a registered object was restored with other state than it had: its state_dict must hold everything that it "
    "computes with, and load_state_dict must restore all of it",
    "scaler": "the gradient scaler received other gradients: look at the differences listed after it",
    "scheduler": "a scheduler was stepped more or less often or by other values, or is not registered with the Session; or the "
    "script computes the learning rate with a variable or an object that no checkpoint has (session.keep, session.prepare)",
    "modules": "a module changed its structure or its flags during training",
    "hook": "the state of the communication hook differs, data and generators do not: the gradients were different",
    "buffers": "buffers differ, data and generators do not: the forward pass computed with something that is not saved",
    "gradients": "",
    "optimizer": "",
    "model": "",
}
_FRAMEWORKS: Final = frozenset({"user:lightning", "user:trainer", "user:accelerate"})
_FRAMEWORK_ADVICE: Final = (
    "the framework's state (its callbacks, logged values, counts) was restored differently. In a class of your own, state_dict "
    "must hold everything that it computes with, and load_state_dict must restore all of it. Otherwise it is a bug in Ratchet: "
    "please report it with these lines"
)
_UNTRACKED_ADVICE: Final = (
    "data and generators are the same, so the steps used state that is in no checkpoint: {}. Register it with the "
    "Session; or the cause is an operation without a fixed order of additions (determinism: warn or strict)"
)
_UNTRACKED_STATE: Final = (
    "a variable of a module, a local variable or its object, a closure, a file, the clock, a generator of its own"
)


@dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints, for a message. ``place``: for display; ``name``: a tensor's name or a JSON pointer;
    ``rank``: None for a shared tensor."""

    component: str
    name: str
    rank: int | None
    place: str
    detail: str


def differences(comparison: Comparison) -> list[Difference]:
    """Return every difference of the comparison, sorted by component so that causes come before consequences."""
    out = [_tensor_difference(tensor) for tensor in comparison.different] + [
        _state_difference(state) for state in comparison.states
    ]
    return sorted(out, key=lambda one: (_order_index(one), one.rank or 0, one.name))


def advice(found: Sequence[Difference], unsaved: Sequence[str]) -> str | None:
    """Return advice on the first difference in ``found``, None if ``found`` is empty. ``unsaved``: as in ``Comparison``."""
    if not found:
        return None
    if found[0].component in _FRAMEWORKS:
        return _FRAMEWORK_ADVICE
    what = f"{join_first(unsaved)}, which training has changed, or {_UNTRACKED_STATE}" if unsaved else _UNTRACKED_STATE
    return _ADVICE[_ORDER[_order_index(found[0])]] or _UNTRACKED_ADVICE.format(what)


def _order_index(one: Difference) -> int:
    """Return the index in ``_ORDER`` by which a difference is sorted: in general that of its component."""
    component = one.component
    if component.startswith("optimizer") and "param_groups" in one.place:  # learning rates are set by a scheduler
        return _ORDER.index("scheduler")
    if one.place.startswith("modules gradients"):  # left by the step: they follow from its forward pass
        return _ORDER.index("gradients")
    kind = component.partition("_")[0] if component.startswith(("scheduler", "optimizer")) else component
    return _ORDER.index(kind) if kind in _ORDER else _ORDER.index("user")


def _tensor_difference(tensor: TensorComparison) -> Difference:
    """Return the difference of one tensor that is not equal; its rank is taken from its name."""
    component, rank = component_of(tensor.name), None
    rest = tensor.name.removeprefix(SHARED_PREFIX)
    if rest == tensor.name and rest.startswith("rank/"):
        number, rest = rest.removeprefix("rank/").split("/", 1)
        rank = int(number)
    return Difference(component, tensor.name, rank, _place_text(component, rest, rank), _detail_text(tensor))


def _place_text(component: str, name: str, rank: int | None) -> str:
    """Return a tensor's display text, such as ``parameter conv.weight`` or ``optimizer, exp_avg of conv.weight (rank 1)``."""
    path = name.removeprefix(component).removeprefix("/")
    where = "" if rank is None else f" (rank {rank})"
    if component == "model":
        return f"parameter {path}{where}"
    if component.startswith("optimizer") and "/" in path:
        parameter, _, key = path.rpartition("/")
        return f"{component}, {key} of {parameter}{where}"
    titles = {"buffers": "buffer", "rng": "generator", "hook": "hook state"}
    title = titles.get(component, component.removeprefix("user:"))
    return f"{title} {path}{where}".strip()


def _detail_text(tensor: TensorComparison) -> str:
    """Return how a tensor differs: its note, or the number of elements that differ and the first of them."""
    if tensor.note is not None:
        return tensor.note
    assert tensor.first is not None and tensor.count is not None
    text = f"{tensor.count} of {math.prod(tensor.shape)} elements differ, the first at {_index(tensor.first, tensor.shape)}"
    if tensor.values is not None:
        text += f": {tensor.values[0]:.9g} against {tensor.values[1]:.9g}"
    return text if tensor.largest is None else f"{text}; largest difference seen {tensor.largest:.3g}"


def _index(flat: int, shape: tuple[int, ...]) -> list[int]:
    """Convert a row-major index to a list with one number per dimension."""
    out = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        out.append(place)
    return out[::-1]


def _state_difference(state: StateDifference) -> Difference:
    """Return the difference of one place in a rank's JSON state."""
    component = state.path[0] if state.path else ""
    path = ".".join(state.path[1:])
    title = {"rng": "generator", "facts": "fact", "hook": "hook state"}.get(component, component.removeprefix("user:"))
    place = f"{title}{', ' if path else ''}{path} (rank {state.rank})"
    if (component, path) == ("attributes", "unsaved"):
        place = f"state that training has changed and no checkpoint has (rank {state.rank})"
    return Difference(component, state.pointer, state.rank, place, f"{state.a} against {state.b}")
