"""An optimizer's state by parameter name. Restored tensors keep their recorded dtypes, such as float32 momenta of bfloat16
parameters."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import torch
from torch.optim import Optimizer

from ratchet_contract.errors import StateError, UserError
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.encode import Encoded, encode, is_dense
from ratchet_hooks.torch_compat import has_state_hooks
from ratchet_worker.state.change_detection import CONSTANTS, Contents, Same, is_constant
from ratchet_worker.state.snapshot import Tensors

_ADDED: Final = (
    "Groups that training adds at some step (add_param_group) must exist before the first step of a resumed run: let the "
    "script add them with `if session.step >= N: optimizer.add_param_group(...)`, where N is how many steps were done without"
)
_OWN: Final = "ratchet:own"
_SHARED: Final = "ratchet:shared"
"""In format 1, the key of the placeholder for a shared tensor; its value is the list of strides."""


def check_not_sharded(name: str, optimizer: Optimizer) -> None:
    """Raise ``UserError`` if ``optimizer``, or one in its attributes, is a ``ZeroRedundancyOptimizer``, whose state is spread
    over the ranks."""
    # By name: importing torch.distributed.optim costs every rank a second at its start.
    kinds = {kind.__name__ for part in (optimizer, *vars(optimizer).values()) for kind in type(part).__mro__}
    if "ZeroRedundancyOptimizer" in kinds:
        raise UserError(
            f"{name}: ZeroRedundancyOptimizer keeps each part of the state on one rank only, which is not supported; use the "
            "optimizer that it wraps"
        )


class AroundOptimizer:
    """Adds to the ``state_dict`` of an optimizer's wrapper, such as schedulefree's, its attributes that are numbers, strings or
    booleans."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapper's own ``state_dict``, with its numbers, strings and booleans under one more key."""
        own = {name: value for name, value in vars(self.item).items() if type(value) in (bool, int, float, str)}
        return {**self.item.state_dict(), _OWN: own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the wrapper's own state, and set the attributes that ``state_dict`` has added."""
        self.item.load_state_dict({key: value for key, value in state.items() if key != _OWN})
        vars(self.item).update(state.get(_OWN, {}))


class Captured(NamedTuple):
    """An optimizer's state. ``shared``, ``tensors``: names and tensors of replicated parameters; ``rest``: everything else.
    ``layout_key``: the same object only while parameters, tensors and names are the same. ``is_change_detectable``: False if
    changes may go unnoticed. ``is_reused``: names are from an earlier capture, valid only if the caller finds each tensor's
    shape, dtype and strides unchanged."""

    shared: list[str]
    tensors: list[torch.Tensor]
    rest: object
    layout_key: object
    is_change_detectable: bool
    is_reused: bool


class Capture:
    """Captures the state of one optimizer for each save; may reuse names while the optimizer holds the very same objects."""

    def __init__(self, optimizer: Optimizer, component: str) -> None:
        self.optimizer, self._component = optimizer, component
        self._known: _Known | None = None

    def capture_state(self, names: Mapping[int, str], replicated: Collection[str], *, force: bool = False) -> Captured:
        """Return the current state, with live tensors. ``names``: by parameter ``id``. ``force``: reuse nothing. Raises
        ``StateError`` if a parameter's state is not a dict."""
        optimizer, known = self.optimizer, self._known
        plain = _is_plain(optimizer)
        if not force and known is not None and plain and known.names is names and known.replicated is replicated:
            tensors = known.tensors(optimizer)
            if tensors is not None:
                return Captured(known.shared, tensors, known.rest(optimizer), known, True, True)
        shared, rest = capture(optimizer, self._component, names, replicated)
        constant = not any(rest[part] for part in ("others", "extra")) and all(
            isinstance(value, CONSTANTS) for values in rest["state"].values() for value in values.values()
        )
        self._known = None
        if plain and constant:
            with suppress(HookStateError):  # reported when the caller encodes it
                self._known = _Known(optimizer, names, replicated, shared, rest)
        known = self._known
        return Captured([*shared], [*shared.values()], rest, known or object(), known is not None, False)


class _Known:
    """The parts of an earlier result of ``capture`` that can be reused. Raises ``HookStateError`` if something cannot be
    encoded."""

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        replicated: Collection[str],
        shared: Tensors,
        rest: dict[str, Any],
    ) -> None:
        self.names, self.replicated, self.shared = names, replicated, [*shared]
        self._states = Contents([optimizer.state, *optimizer.state.values()])
        self._parameters = Same(_parameters(optimizer))
        self._counts = [len(group["params"]) for group in optimizer.param_groups]
        values = [*_values(optimizer.state)]
        place = {id(one): number for number, one in enumerate(values)}
        self._places = [place[id(tensor)] for tensor in shared.values()]
        self._in_order = self._places == [*range(len(values))]
        self._constant = {key: Encoded(encode(rest[key], root=key)[1]) for key in rest if key != "param_groups"}
        self._keys = [*rest]
        self._labels = [Encoded(encode(group["params"], root="params")[1]) for group in rest["param_groups"]]
        self._groups: Contents | None = None
        self._rest: object = None

    def tensors(self, optimizer: Optimizer) -> list[torch.Tensor] | None:
        """Return the current shared tensors; None if the optimizer holds other objects or names than at the earlier capture."""
        state, groups = optimizer.state, optimizer.param_groups
        if (
            not self._states.matches([state, *state.values()])
            or [len(group["params"]) for group in groups] != self._counts
        ):
            return None
        if not self._parameters.matches(_parameters(optimizer)):
            return None
        values = [*_values(state)]
        return values if self._in_order else [values[place] for place in self._places]

    def rest(self, optimizer: Optimizer) -> object:
        """Return the ``rest`` of ``capture``, with the current options of the groups. Some parts of it, or all of it, are encoded
        already."""
        groups = optimizer.param_groups
        if self._groups is not None and self._groups.matches(groups):
            return self._rest
        each = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": labels}
            for group, labels in zip(groups, self._labels, strict=True)
        ]
        rest = {key: self._constant.get(key, each) for key in self._keys}
        self._groups = None
        if all(type(group) is dict for group in groups) and all(
            type(value) is Encoded or is_constant(value) for one in each for value in one.values()
        ):
            with suppress(HookStateError):  # reported when the caller encodes it
                self._rest = Encoded(encode(rest, root="groups")[1])
                self._groups = Contents(groups)
        return rest if self._groups is None else self._rest


def _is_plain(optimizer: Optimizer) -> bool:
    """True if the optimizer uses torch's own ``state_dict``, without hooks, and keeps its state in the containers that torch
    uses."""
    own = type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer)
    if own or has_state_hooks(optimizer):
        return False
    return type(optimizer.state) in (dict, defaultdict) and {*map(type, optimizer.state.values())} <= {dict}


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Return all parameters, in the order of the groups."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _values(state: Mapping[Any, dict[Any, Any]]) -> Iterator[Any]:
    """Return all values of the parameters' state dictionaries, in their order."""
    return chain.from_iterable(map(dict.values, state.values()))


def capture(
    optimizer: Optimizer, component: str, names: Mapping[int, str], replicated: Collection[str]
) -> tuple[Tensors, dict[str, Any]]:
    """Return ``(shared, rest)``, the optimizer's current state, with live tensors. ``shared``: plain tensors of ``replicated``
    parameters, by name (``optimizer/layer.weight/exp_avg``). ``rest``: everything else, a tree for
    ``ratchet_hooks.state.encode``. ``names``: parameter name by ``id``. Raises ``StateError`` if a parameter's state is not a
    dict."""
    state = optimizer.state_dict()
    labels, replicated = list(_labels(optimizer, names)), frozenset(replicated)
    shared: Tensors = {}
    keys: list[tuple[str, list[tuple[Any, Any]]]] = []
    entries: dict[str, dict[str, Any]] = {}
    others: dict[Any, Any] = {}
    for index, values in state["state"].items():
        if not isinstance(index, int):  # not a parameter's: state_dict leaves such keys unchanged
            others[index] = values
            continue
        label = labels[index]
        if not isinstance(values, dict):
            raise StateError(f"{component}: the state of {label} is a {type(values).__name__}, not a dict")
        rest: dict[str, Any] = {}
        listed: list[tuple[Any, Any]] = []
        equal = label in replicated and all(isinstance(key, str) for key in values)
        for key, value in values.items():
            if equal and _is_plain_tensor(value):
                shared[f"{component}/{label}/{key}"] = value
                listed.append((key, value.stride()))
            else:
                rest[key] = value
                listed.append((key, None))
        if equal:
            keys.append((label, listed))
        if rest or not equal:
            entries[label] = rest
    groups = [{**group, "params": [labels[i] for i in group["params"]]} for group in state["param_groups"]]
    extra = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
    place = _order_key({name: number for number, name in enumerate(names.values())})
    ordered = [{**group, "params": sorted(group["params"], key=place)} for group in groups]
    if any(one["params"] != other["params"] for one, other in zip(groups, ordered, strict=True)):
        # Parameters from a set, say, have another order on every rank and in every attempt: all ranks store one order.
        order = {label: number for number, label in enumerate(label for group in ordered for label in group["params"])}
        keys.sort(key=lambda pair: order[pair[0]])
        entries = {label: entries[label] for label in sorted(entries, key=order.__getitem__)}
        named = (f"{component}/{label}/{key}" for label, listed in keys for key, stride in listed if stride is not None)
        shared = {name: shared[name] for name in named}
        if not isinstance(optimizer, torch.optim.LBFGS):  # its vectors are all parameters in a row
            groups = ordered
    # Each key with the strides of its shared tensor; null: the value is in ``rest``. Text, not a tree: it has an entry for every
    # tensor, and training waits.
    text = json.dumps(keys, separators=(",", ":"))
    return shared, {"keys": text, "state": entries, "others": others, "param_groups": groups, "extra": extra}


def is_captured(rest: Any) -> bool:
    """True if ``rest`` has exactly the keys that ``capture`` gives it, in this format or the previous one."""
    return isinstance(rest, dict) and set(rest) - {"keys"} == {"state", "others", "param_groups", "extra"}


def restore(optimizer: Optimizer, component: str, names: dict[int, str], shared: Tensors, rest: Any) -> None:
    """Load a captured state into the optimizer, bit for bit. Raises ``StateError`` if the optimizer has other parameters or
    groups."""
    labels = list(_labels(optimizer, names))
    recorded = [label for group in rest["param_groups"] for label in group["params"]]
    if sorted(recorded) != sorted(labels):
        odd = sorted(set(recorded) ^ set(labels))
        raise StateError(
            f"{component}: it has other parameters than the recorded one: {', '.join(odd[:3]) or 'in number'}. {_ADDED}"
        )
    sizes = [[len(g["params"]) for g in groups] for groups in (rest["param_groups"], optimizer.param_groups)]
    own = iter(labels)
    groups = [
        {**group, "params": list(islice(own, size))}
        for group, size in zip(rest["param_groups"], sizes[1], strict=False)
    ]
    moved = isinstance(optimizer, torch.optim.LBFGS) and recorded != labels  # its vectors are all parameters in a row
    if (
        sizes[0] != sizes[1]
        or moved
        or any(set(a["params"]) != set(b["params"]) for a, b in zip(groups, rest["param_groups"], strict=True))
    ):
        raise StateError(f"{component}: its parameter groups hold other parameters than the recorded ones. {_ADDED}")
    rest = {**rest, "param_groups": groups}  # within a group the order may differ (parameters from a set)
    entries = _entries(component, shared, rest)
    optimizer.load_state_dict(_numbered(entries, rest))
    _undo_casts(optimizer, labels, entries)


def as_state_dict(component: str, shared: Tensors, rest: Any) -> dict[str, Any]:
    """Return a captured state in the form of ``Optimizer.state_dict``, with parameters numbered in the recorded order."""
    return _numbered(_entries(component, shared, rest), rest)


def _numbered(entries: dict[str, dict[str, Any]], rest: Any) -> dict[str, Any]:
    """Return a ``state_dict`` made of the state ``entries`` and of ``rest``, with numbers instead of parameter names."""
    index = {label: i for i, label in enumerate(label for group in rest["param_groups"] for label in group["params"])}
    groups = [{**group, "params": [index[label] for label in group["params"]]} for group in rest["param_groups"]]
    state = {index[label]: values for label, values in entries.items()} | rest["others"]
    return {"state": state, "param_groups": groups, **rest["extra"]}


def _entries(component: str, shared: Tensors, rest: Any) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter, by name: shared tensors with recorded strides, and values in ``rest``."""
    own = rest["state"]
    if "keys" not in rest:  # format 1
        return {
            label: {k: _tensor(shared, f"{component}/{label}/{k}", v) for k, v in values.items()}
            for label, values in own.items()
        }
    equal = {
        label: {
            key: own[label][key] if stride is None else _strided(shared[f"{component}/{label}/{key}"], stride)
            for key, stride in keys
        }
        for label, keys in json.loads(rest["keys"])
    }
    return equal | {label: values for label, values in own.items() if label not in equal}


def _tensor(shared: Tensors, name: str, value: Any) -> Any:
    """For format 1: return the shared tensor ``name`` if ``value`` is a placeholder for one; else ``value``."""
    if not isinstance(value, dict) or list(value) != [_SHARED]:
        return value
    return _strided(shared[name], value[_SHARED])


def _strided(stored: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a shared tensor with its recorded strides, if these are dense. The result may be ``stored`` itself."""
    if stored.stride() == tuple(stride) or not is_dense(torch.empty_strided(stored.shape, stride, device="meta")):
        return stored
    return torch.empty_strided(stored.shape, stride, dtype=stored.dtype).copy_(stored)


def _undo_casts(optimizer: Optimizer, labels: list[str], entries: dict[str, dict[str, Any]]) -> None:
    """Replace the tensors that ``load_state_dict`` has cast by ones of the recorded dtype and strides. ``labels``: parameter
    names in order."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for label, parameter in zip(labels, parameters, strict=True):
        for key, value in entries.get(label, {}).items():
            if key in optimizer.state[parameter]:
                optimizer.state[parameter][key] = _as_recorded(value, optimizer.state[parameter][key])


def _as_recorded(value: Any, there: Any) -> Any:
    """Return ``there``, which ``load_state_dict`` made of ``value``, with the recorded dtypes and strides, on the same device, in
    containers of the recorded types. A string is returned as recorded: ``load_state_dict`` makes ``str`` of a generator."""
    if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
        same = (there.dtype, there.stride()) == (value.dtype, value.stride())
        return there if same else value.to(there.device, copy=True)
    if isinstance(value, dict) and isinstance(there, dict):
        found = copy(value)  # a defaultdict keeps its factory
        for key, item in value.items():  # ``update`` of a Counter adds
            found[key] = _as_recorded(item, there[key])
        return found
    if type(value) in (list, tuple, deque) and isinstance(there, list | tuple | deque):
        items = [_as_recorded(item, other) for item, other in zip(value, there, strict=True)]
        return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)
    return value if isinstance(value, str) else there


def _labels(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[str]:
    """Yield each parameter's name, in the order of ``state_dict``; ``#NUMBER`` for a parameter outside of the model."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in enumerate(parameters):
        yield names.get(id(parameter), f"#{number}")


def _order_key(place: Mapping[str, int]) -> Callable[[str], int]:
    """Return a sort key for labels: their number in ``place``. Labels that are not in it come last."""
    return lambda label: place.get(label, len(place))


def _is_plain_tensor(value: Any) -> bool:
    """True for a tensor that can be shared: of torch's own class, strided, neither quantized nor complex."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.dtype.is_complex
    )
