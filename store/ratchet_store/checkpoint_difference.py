"""What two checkpoints differ in, in words: what explains the rest first, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ratchet_contract.manifest import SHARED_PREFIX
from ratchet_contract.plural import first_of
from ratchet_store.compare import Comparison, StateDifference, TensorComparison, component_of

_ORDER: Final = (
    "facts", "data", "data_generators", "rng", "attributes", "user", "scaler", "scheduler", "modules", "hook", "buffers",
    "gradients", "optimizer", "model",
)  # fmt: skip
"""Components of a checkpoint, causes before consequences; ``user``: what a script has registered under a name of its own."""
_ADVICE: Final = {
    "facts": "they ran on other software, hardware or switches: nothing else can be expected to be equal",
    "data": "the data were read to another place, or in another order: register the object that gives the batches "
    "(TrainLoader, or a TrainStream with state_dict)",
    "data_generators": "a generator that the data hold for themselves stands elsewhere: draw from torch's, numpy's or Python's "
    "process-wide ones, or register it",
    "rng": "a process-wide generator was drawn from more often in one of them: look for draws that not every attempt repeats, "
    "such as in the set-up, behind a condition on time, or in a callback",
    "attributes": "an attribute of the model, an optimizer or the data set, or a variable of a module, has another value, and "
    "training may read it: register the object (session.prepare(SimpleNamespace(...)) for a variable), or "
    "session.ignore(path, reason) if training does not depend on it",
    "user": "a registered object came back with other state than it had: its state_dict must hold everything that it computes "
    "with, and load_state_dict must put all of it back",
    "scaler": "the gradient scaler saw other gradients: look at what is listed after it",
    "scheduler": "the scheduler was stepped more or less often or by other values, or is not registered with the Session",
    "modules": "a module changed its form or its switches while training",
    "hook": "the state of the communication hook differs, data and generators do not: the gradients were other ones",
    "buffers": "buffers differ, data and generators do not: the forward pass computed with something that is not saved",
    "gradients": "",
    "optimizer": "",
    "model": "",
}
_FRAMEWORKS: Final = frozenset({"user:lightning", "user:trainer", "user:accelerate"})
_OF_FRAMEWORK: Final = (
    "what the framework keeps (its callbacks, logged values, counts) came back otherwise. Of a class of your own: its state_dict "
    "must hold everything that it computes with, and load_state_dict must put all of it back. Else it is a defect of Ratchet's: "
    "please report it with these lines"
)
_OUTSIDE: Final = (
    "data and generators are the same, so the steps computed with something that no checkpoint has: {}. Register it with the "
    "Session; or an operation without a fixed order of additions (determinism: warn or strict)"
)
_UNSEEN: Final = "a variable of a module, a closure, a file, the clock, a generator of the code's own"


@dataclass(frozen=True)
class Difference:
    """``place``: the tensor or value, for people; ``name``: as the checkpoint has it (a tensor's name, or a JSON pointer);
    ``rank``: None where all ranks share it."""

    component: str
    name: str
    rank: int | None
    place: str
    detail: str


def differences(found: Comparison) -> list[Difference]:
    """Every difference, causes before consequences."""
    out = [_of_tensor(tensor) for tensor in found.different] + [_of_state(state) for state in found.states]
    return sorted(out, key=lambda one: (_place_of(one), one.rank or 0, one.name))


def advice(found: Sequence[Difference], unsaved: Sequence[str]) -> str | None:
    """What to do about the first of ``differences``; None where there is none. ``unsaved``: see ``Comparison``."""
    if not found:
        return None
    if found[0].component in _FRAMEWORKS:
        return _OF_FRAMEWORK
    what = f"{first_of(unsaved)}, which training has changed, or {_UNSEEN}" if unsaved else _UNSEEN
    return _ADVICE[_ORDER[_place_of(found[0])]] or _OUTSIDE.format(what)


def _place_of(one: Difference) -> int:
    component = one.component
    if component.startswith("optimizer") and "param_groups" in one.place:  # learning rates are a scheduler's
        return _ORDER.index("scheduler")
    if one.place.startswith("modules gradients."):  # left by the step: they follow from its forward pass
        return _ORDER.index("gradients")
    kind = component.partition("_")[0] if component.startswith(("scheduler", "optimizer")) else component
    return _ORDER.index(kind) if kind in _ORDER else _ORDER.index("user")


def _of_tensor(tensor: TensorComparison) -> Difference:
    component, rank = component_of(tensor.name), None
    rest = tensor.name.removeprefix(SHARED_PREFIX)
    if rest == tensor.name and rest.startswith("rank/"):
        number, rest = rest.removeprefix("rank/").split("/", 1)
        rank = int(number)
    return Difference(component, tensor.name, rank, _placed(component, rest, rank), _told(tensor))


def _placed(component: str, name: str, rank: int | None) -> str:
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


def _told(tensor: TensorComparison) -> str:
    if tensor.note is not None:
        return tensor.note
    assert tensor.first is not None and tensor.count is not None
    text = f"{tensor.count} of {math.prod(tensor.shape)} elements differ, the first at {_index(tensor.first, tensor.shape)}"
    if tensor.values is not None:
        text += f": {tensor.values[0]:.9g} against {tensor.values[1]:.9g}"
    return text if tensor.largest is None else f"{text}; largest difference seen {tensor.largest:.3g}"


def _index(flat: int, shape: tuple[int, ...]) -> list[int]:
    """Row-major, a number per dimension."""
    out = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        out.append(place)
    return out[::-1]


def _of_state(state: StateDifference) -> Difference:
    component = state.path[0] if state.path else ""
    path = ".".join(state.path[1:])
    title = {"rng": "generator", "facts": "fact", "hook": "hook state"}.get(component, component.removeprefix("user:"))
    place = f"{title}{', ' if path else ''}{path} (rank {state.rank})"
    if (component, path) == ("attributes", "unsaved"):
        place = f"what training has changed and no checkpoint has (rank {state.rank})"
    return Difference(component, state.pointer, state.rank, place, f"{state.a} against {state.b}")
