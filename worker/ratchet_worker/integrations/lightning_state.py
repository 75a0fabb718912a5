"""Collects and restores state of Lightning's Trainer, such as logged values, torchmetrics and attributes of callbacks."""

from __future__ import annotations

import builtins
import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, SpikeDetection, WeightAveraging
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import nn
from torchmetrics import Metric

from ratchet_contract.errors import UserError
from ratchet_hooks.algorithms.state_version import same_bits
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.encode import Tensors, decode, encode
from ratchet_hooks.torch_compat import version_of

State = dict[str, Any]

_META: Final = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
_CALLBACK_STATE: Final[dict[type, tuple[str, ...]]] = {
    ModelCheckpoint: (
        "current_score",
        "_last_global_step_saved",
        "_last_checkpoint_saved",
        "_defer_save_until_validation",
    ),
    SpikeDetection: ("last_val", "bad_batches"),
    WeightAveraging: ("_latest_update_step", "_latest_update_epoch"),
}
"""State of Lightning's own callbacks that their ``state_dict`` leaves out or rounds."""

# --- torchmetrics ------------------------------------------------------------------------------------------------------


def metric_states(module: nn.Module) -> State:
    """Return the state of every torchmetrics metric in ``module``, by the metric's path, including values that are not
    persistent."""
    return {path: _metric(m) for path, m in module.named_modules() if isinstance(m, Metric)}


def restore_metrics(module: nn.Module, state: State) -> None:
    """Set the metrics in ``module`` to the states that ``metric_states`` returned; metrics without a state stay as they are."""
    for path, metric in module.named_modules():
        if isinstance(metric, Metric) and path in state:
            _restore_metric(metric, state[path])


def _metric(metric: Metric) -> State:
    """Return the state of one metric: its values, its attributes that are numbers, and its cached results that are a tensor, a
    number or None."""
    return {
        "values": {name: getattr(metric, name) for name in metric._defaults},
        "numbers": {name: value for name, value in vars(metric).items() if type(value) in (int, float)},
        "caches": {name: getattr(metric, name) for name in ("_computed", "_forward_cache") if _is_plain(metric, name)},
    }


def _is_plain(metric: Metric, name: str) -> bool:
    """True if the metric's attribute is a tensor, a number or None, or is missing."""
    return isinstance(getattr(metric, name, None), torch.Tensor | float | int | None)


def _restore_metric(metric: Metric, state: State) -> None:
    """Set the metric's attributes to the state that ``_metric`` returned."""
    metric._computed = None
    for name, value in {**state["values"], **state["numbers"], **state["caches"]}.items():
        setattr(metric, name, value)


# --- values that are logged --------------------------------------------------------------------------------------------


def result_states(results: _ResultCollection) -> State:
    """Return the state of the logged values, by key. Raises ``UserError`` for one with a process group of its own."""
    return {key: _result(result) for key, result in results.items()}


def _result(result: _ResultMetric) -> State:
    """Return the state of one logged value. Raises ``UserError`` for a process group of its own."""
    meta = result.meta
    if meta.sync.group not in (None, torch.distributed.group.WORLD):
        raise UserError(
            f"self.log({meta.name!r}, sync_dist_group=...) over a group of its own cannot be saved: reduce the value in the "
            "module, and log it without sync_dist"
        )
    out = _metric(result)
    if not result.is_tensor:
        del out["caches"]["_computed"]
    return {
        **out,
        "defaults": result._defaults,  # have the type that numbers have within a step
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": [meta.reduce_fx is getattr(builtins, meta.reduce_fx.__name__, None), meta.reduce_fx.__name__],
        "sync": [meta.sync.should, meta.sync.rank_zero_only, meta.sync.group is not None],
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
    }


def restore_results(results: _ResultCollection, state: State, module: nn.Module, reduce: Callable[..., Any]) -> None:
    """Replace the logged values by those in ``state``. ``reduce``: the strategy's function that reduces a value over the ranks.
    ``module``: the module in which logged metric objects are found."""
    results.clear()
    for key, saved in state.items():
        built_in, name = saved["reduce"]
        meta = _Metadata(**saved["meta"], reduce_fx=getattr(builtins if built_in else torch, name))
        should, rank_zero_only, world = saved["sync"]
        group = torch.distributed.group.WORLD if world else None
        meta.sync = _Sync(fn=reduce, _should=should, rank_zero_only=rank_zero_only, _group=group)
        results[key] = result = _ResultMetric(meta, saved["is_tensor"])
        _restore_metric(result, saved)
        result._defaults = saved["defaults"]
        result.has_reset = saved["has_reset"]
        if not result.is_tensor:
            result.value = operator.attrgetter(str(meta.metric_attribute))(module)


# --- attributes --------------------------------------------------------------------------------------------------------


class Attributes:
    """Attributes of the Trainer and of callbacks that change in training. ``named``: objects by name, each with the attributes to
    save."""

    def __init__(self, named: Mapping[str, tuple[object, Iterable[str]]], callbacks: Iterable[Callback]) -> None:
        self._named = [(name, item, tuple(keys)) for name, (item, keys) in named.items()]
        self._callbacks = [*callbacks]
        self._initial = {
            path: _encode_copy(value) for path, _, _, value in self._storable_attributes()
        }  # before any hook of the training

    def state(self) -> State:
        """Return the storable attributes, by path, whose values differ from those at construction."""
        return {
            path: value
            for path, _, _, value in self._storable_attributes()
            if not _is_same(self._initial.get(path), value)
        }

    def restore(self, state: State) -> None:
        """Restore ``state``. Attributes that it does not have get the value that they had when this object was made."""
        found = {path: (item, key) for path, item, key, _ in self._storable_attributes()}
        for path, (item, key) in found.items():
            if path in state:
                _set(item, key, state[path])
            elif path in self._initial:
                _set(item, key, decode(*self._initial[path]))
        owners = dict(self._owners())
        for path in state.keys() - found.keys():  # created later in training
            owner, _, key = path.rpartition("/")
            if owner in owners:
                _set(owners[owner], key, state[path])

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """The objects with their names; callbacks are named by number and class."""
        yield from ((name, item) for name, item, _ in self._named)
        yield from ((f"{n}:{type(callback).__qualname__}", callback) for n, callback in enumerate(self._callbacks))

    def _storable_attributes(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Yield path, object, name and value of each attribute that can be stored; a metric's value is its state."""
        keys = [k for _, _, k in self._named] + [_own_names(callback) for callback in self._callbacks]
        for (path, item), names in zip(self._owners(), keys, strict=True):
            for name in names:
                if name in vars(item):
                    value = vars(item)[name]
                    value = metric_states(value) if isinstance(value, Metric) else value
                    if _storable(value):
                        yield f"{path}/{name}", item, name, value


def _set(item: Any, name: str, value: Any) -> None:
    """Set an attribute; for a metric, restore the metric's state."""
    if isinstance(vars(item).get(name), Metric):
        restore_metrics(vars(item)[name], value)
    else:
        setattr(item, name, value)


def _own_names(callback: Callback) -> list[str]:
    """Return the names of a callback's attributes to save, such as its metrics and those of the user's code."""
    theirs = [kind for kind in type(callback).__mro__ if kind.__module__.startswith("lightning.")]
    # Code of Lightning's classes mentions none of the attributes that the user's code has added.
    known = {name for kind in theirs for function in vars(kind).values() for name in _names_in(function)}
    forgotten = [name for kind in theirs for name in _CALLBACK_STATE.get(kind, ())]
    metrics = [name for name, value in vars(callback).items() if isinstance(value, Metric)]
    return [*dict.fromkeys([*forgotten, *metrics, *(n for n in vars(callback) if n not in known)])]


def _names_in(function: Any) -> tuple[str, ...]:
    """Return the names of attributes and globals that a function, a method or a property's getter uses directly; empty for
    anything else."""
    function = getattr(function, "fget", None) or getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_names


def _storable(value: Any) -> bool:
    """True if ``value`` can be encoded for a checkpoint."""
    try:
        encode(value, root="")
    except HookStateError:
        return False
    return True


def _encode_copy(value: Any) -> tuple[Tensors, Any]:
    """Encode ``value``, with copies of its tensors."""
    tensors, data = encode(value, root="")
    return {name: tensor.clone() for name, tensor in tensors.items()}, data


def _is_same(before: tuple[Tensors, Any] | None, value: Any) -> bool:
    """True if the encoded ``value`` compares equal to ``before``, tensors and floats bit for bit. False if ``before`` is None."""
    if before is None:
        return False
    tensors, data = encode(value, root="")
    return data == before[1] and all(same_bits(tensor, before[0][name]) for name, tensor in tensors.items())


# --- on_save_checkpoint ------------------------------------------------------------------------------------------------


def has_save_hook(module: LightningModule, callbacks: Iterable[Callback]) -> bool:
    """True if the module or a callback has an ``on_save_checkpoint`` other than Lightning's empty one."""
    empty: list[Any] = [LightningModule.on_save_checkpoint, Callback.on_save_checkpoint]
    owners: list[Any] = [module, *callbacks]
    return any(getattr(one.on_save_checkpoint, "__func__", None) not in empty for one in owners)


class Additions:
    """The changes that hooks make in place to ``checkpoint``. ``left_out``: entries with changes that cannot be stored, set by
    ``changes``."""

    TRACKED_PARTS: Final = ("state_dict", "callbacks")
    # Changes within these are not tracked: the job restores optimizers and schedulers itself.
    RESTORED: Final = ("optimizer_states", "lr_schedulers")

    def __init__(self, checkpoint: State) -> None:
        self._checkpoint = checkpoint
        self.left_out: list[str] = []
        self._before = dict(checkpoint)
        self._parts = {key: dict(value) for key, value in checkpoint.items() if isinstance(value, dict)}
        whole = checkpoint.keys() - self._parts.keys() - {*self.RESTORED}
        self._flat = {key: _flat(checkpoint[key]) for key in whole}
        self._flat_parts = {key: {n: _flat(v) for n, v in part.items()} for key, part in self._parts.items()}

    def changes(self) -> State:
        """Return the tracked changes since construction; call it after the hooks have run."""
        now, self.left_out = self._checkpoint, []
        put = {
            k: self._without_weights(v)
            for k, v in now.items()
            if self._is_put(self._before, k, v)
            or (k in self._flat and _differs(self._flat[k], v) and self._is_storable(k, v))
        }
        parts = {
            key: [
                {
                    n: v
                    for n, v in now[key].items()
                    if (n not in part or _differs(self._flat_parts[key][n], v))
                    and ((key in self.TRACKED_PARTS and self._is_put(part, n, v)) or self._is_storable(f"{key}.{n}", v))
                },
                [n for n in part if n not in now[key]],
            ]
            for key, part in self._parts.items()
            if now.get(key) is self._before[key]
        }
        gone = [key for key in self._before if key not in now]
        return {"put": put, "gone": gone, "parts": {key: part for key, part in parts.items() if any(part)}}

    @staticmethod
    def _is_put(before: State, key: str, value: Any) -> bool:
        """True if ``before`` has no ``key``, or has another object than ``value`` there."""
        return key not in before or value is not before[key]

    def _is_storable(self, name: str, value: Any) -> bool:
        """True if the entry ``name`` can be stored; else its name is added to ``left_out``."""
        if _storable(value):
            return True
        self.left_out.append(name)
        return False

    def _without_weights(self, value: Any) -> State:
        """Return ``value`` for storage, with references in place of the module's own tensors, which are not stored twice."""
        for key in self.TRACKED_PARTS:
            if value is self._before[key]:
                return {"is": key}
        weights = self._parts["state_dict"]
        if isinstance(value, dict) and value and any(_share_memory(v, weights.get(k)) for k, v in value.items()):
            own = [k for k, v in value.items() if _share_memory(v, weights.get(k))]
            return {"names": [*value], "own": own, "value": {k: v for k, v in value.items() if k not in own}}
        return {"value": value}

    @classmethod
    def apply(cls, checkpoint: State, found: State) -> State:
        """Make the changes ``found``, which ``changes`` returned, in ``checkpoint``, and return it."""
        weights, before = dict(checkpoint["state_dict"]), dict(checkpoint)
        for key, (changed, gone) in found["parts"].items():
            part = checkpoint.setdefault(key, {})
            part.update(changed)
            for name in gone:
                part.pop(name, None)
        for key in found["gone"]:
            checkpoint.pop(key, None)
        for key, one in found["put"].items():
            if "is" in one:
                checkpoint[key] = before[one["is"]]
            elif "own" in one:
                checkpoint[key] = {n: weights[n] if n in one["own"] else one["value"][n] for n in one["names"]}
            else:
                checkpoint[key] = one["value"]
        return checkpoint


_PLAIN: Final = {type(None), bool, int, float, str, bytes}


def _flat(value: Any, seen: set[int] | None = None) -> list[Any]:
    """Return the nested content of ``value`` as a list for ``_differs``. ``seen``: ids of the containers so far."""
    if isinstance(value, torch.Tensor):
        # A nested tensor is followed by the number of its changes in place. One alone is the module's own memory in any
        # checkpoint.
        return [value] if seen is None else [value, version_of(value)]
    if isinstance(value, np.ndarray):
        return [value.dtype.str, repr(value.shape), value.tobytes()]
    if isinstance(value, set | frozenset):
        return [type(value), frozenset(value)]
    if not isinstance(value, dict | list | tuple | deque):
        return [repr(value) if isinstance(value, float | complex) else value]
    keys, items = ([*value], tuple(value.values())) if isinstance(value, dict) else ([], tuple(value))
    kinds = tuple(map(type, items))
    if {*kinds} <= _PLAIN:  # their types, and the signs of zeros, which == does not compare
        return [type(value), *keys, kinds, items, array("d", [one for one in items if type(one) is float]).tobytes()]
    seen = set() if seen is None else seen
    if id(value) in seen:
        return [value]
    seen.add(id(value))
    return [type(value), len(value), *keys, *(part for item in items for part in _flat(item, seen))]


def _differs(before: list[Any], value: Any) -> bool:
    """True if ``_flat(value)`` differs from ``before``, compared by value for plain types, by identity for other objects."""
    now = _flat(value)
    return len(now) != len(before) or not all(
        a is b or (type(a) is type(b) and isinstance(a, int | str | bytes | tuple | frozenset) and a == b)
        for a, b in zip(before, now, strict=True)
    )


def _share_memory(a: Any, b: Any) -> bool:
    """True if both are tensors, not empty, of the same memory, shape, strides and type."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    same = (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
    return same and a.numel() > 0 and a.data_ptr() == b.data_ptr()
