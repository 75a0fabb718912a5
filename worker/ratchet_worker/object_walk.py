"""A walk through the attributes of objects and what they hold, which finds every object once, by its shortest path.

Looked into are containers, modules, optimizers, schedulers, data sets, bound methods, ``functools.partial``, and objects of the
user's classes. Objects of an installed package are looked into as well, and not ``stored``: a change in one is named only. Not
looked into is what ``_PASSED_BY`` lists: the frameworks themselves, loggers, threads, files.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ratchet_hooks.codec import encode
from ratchet_hooks.torch_compat import storage_id, version_of
from ratchet_worker.rng import GeneratorState, is_generator, process_wide

Kind: TypeAlias = Literal[
    "tensor", "array", "generator", "list", "tuple", "dict", "set", "object", "bound", "sealed", "other"
]
"""``sealed``: has a state that cannot be stored; ``bound``: a bound method or a partial; ``other``: code, or passed by."""
Children: TypeAlias = dict[Any, Any]
"""By index, key or name."""

PLAIN_TENSORS: Final = (torch.Tensor, nn.Parameter)
_CONSTANTS: Final = (
    int, float, complex, str, bytes, type(None), np.generic, Enum, torch.dtype, torch.device, torch.Size, torch.memory_format,
    range, slice,
)  # fmt: skip
_CONTAINERS: Final[dict[Kind, tuple[type, ...]]] = {
    "list": (list, deque), "tuple": (tuple,), "dict": (dict,), "set": (set, frozenset)
}  # fmt: skip
_PASSED_BY: Final = frozenset({
    "torch", "lightning", "pytorch_lightning", "lightning_utilities", "accelerate", "ratchet_worker", "ratchet_hooks",
    "ratchet_contract", "logging", "threading", "_thread", "io", "_io", "weakref", "concurrent", "multiprocessing", "asyncio",
    "re", "pathlib", "abc", "inspect", "warnings", "wandb", "tensorboard", "mlflow", "comet_ml", "neptune", "tqdm", "rich",
    "builtins", "typing", "socket", "queue", "contextlib", "functools", "sqlite3", "tempfile", "subprocess", "datetime",
    "decimal", "fractions", "uuid", "ctypes", "mmap", "operator", "string", "collections", "importlib", "numpy",
})  # fmt: skip
_LOOKED_INTO: Final = ("torch.utils.data",)
_USERS: Final = (SimpleNamespace, Namespace)
"""Classes of Python whose objects are as a user's."""
_TORCHS: Final = (nn.Module, Optimizer, LRScheduler)
_OF_MODULES: Final = frozenset(vars(nn.Module()))
_STATE_OF_MODULES: Final = frozenset({"training", "_parameters", "_buffers", "_modules"})
_MOST: Final = 200_000
"""Objects that are looked at."""
_WHOLE: Final = 16 << 20
"""Bytes of an array up to which all of it is compared; of a larger one so many are sampled."""
_SMALL: Final = 64 << 10
"""Bytes of a tensor on the CPU up to which its elements are compared; for a larger one torch counts changes."""


@dataclass(frozen=True)
class Node:
    """One object at one time. ``mark``: what a leaf is compared by; ``children``: what others hold. ``stored``: it is the
    script's, so that it can be changed and made. ``covered``: a tensor that is saved by itself."""

    item: Any
    kind: Kind
    mark: Any
    children: Children
    stored: bool
    covered: bool = False


@dataclass
class Walked:
    """``nodes``: by path; ``paths``: by the id of their objects; ``places``: by storage, the path of a covered tensor;
    ``complete``: there was no more to be looked at."""

    nodes: dict[str, Node] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    complete: bool = True

    def path_of(self, item: Any) -> str | None:
        path = self.paths.get(id(item))
        return path if path is not None and self.nodes[path].item is item else None


def walk(roots: Mapping[str, Any], left_out: Collection[str] = (), apart: Iterable[Any] = ()) -> Walked:
    """Breadth first from ``roots``, by path. A root that is a module is one whose parts, parameters and buffers are saved by
    themselves. ``left_out``: paths that are not looked into; ``apart``: objects that are saved by themselves."""
    found, passed = Walked(), {*map(id, (*process_wide(), *apart))}
    waiting = deque((path, item, True, isinstance(item, nn.Module)) for path, item in roots.items())
    while waiting:
        path, item, stored, covered = waiting.popleft()
        if id(item) in found.paths or id(item) in passed:
            continue
        if len(found.nodes) == _MOST:
            found.complete = False
            break
        kind = _kind(item)
        its_class: type = type(item)
        stored = stored and (kind != "object" or isinstance(item, _TORCHS) or is_users(its_class))
        children = _children(item, kind, covered=covered)
        if left_out:
            children = {key: child for key, child in children.items() if f"{path}{step(kind, key)}" not in left_out}
        found.paths[id(item)] = path
        found.nodes[path] = Node(item, kind, _mark(item, kind), children, stored)
        if covered:
            for name, tensor in (*item.named_parameters(recurse=False), *item.named_buffers(recurse=False)):
                _cover(found, f"{path}.{name}", tensor)
            waiting.extendleft(
                (f"{path}.{name}", part, True, True) for name, part in reversed([*item.named_children()])
            )
        waiting.extend(
            (f"{path}{step(kind, key)}", child, stored, False)
            for key, child in children.items()
            if not is_constant(child)
        )
    return found


def _cover(found: Walked, path: str, tensor: torch.Tensor) -> None:
    if id(tensor) not in found.paths:
        found.paths[id(tensor)] = path
        found.nodes[path] = Node(tensor, "tensor", None, {}, stored=False, covered=True)
        if tensor.layout is torch.strided and tensor.numel():
            found.places.setdefault(storage_id(tensor), path)


def step(kind: Kind, key: Any) -> str:
    """How a path goes on from an object of this kind to what it holds under ``key``."""
    return f".{key}" if kind in ("object", "bound") else f"[{key!r}]"


def is_constant(item: Any) -> bool:
    """A value that cannot change, or a tuple of such."""
    return isinstance(item, _CONSTANTS) or (type(item) is tuple and all(map(is_constant, item)))


def _kind(item: Any) -> Kind:
    if isinstance(item, torch.Tensor):
        return "tensor" if item.layout is torch.strided else "sealed"
    if isinstance(item, np.ndarray):
        return "array" if item.dtype.kind in "biufcSUmM" and not isinstance(item, np.memmap) else "sealed"
    if is_generator(item):
        return "generator"
    for kind, types in _CONTAINERS.items():
        if isinstance(item, types):
            return kind
    if isinstance(item, (MethodType, partial)):
        return "bound"
    if isinstance(item, (FunctionType, type, ModuleType)):
        return "other"
    if hasattr(type(item), "__next__") and not hasattr(item, "__dict__"):
        return "other" if hasattr(item, "fileno") else "sealed"
    its_class = cast(type, type(item))
    package = its_class.__module__
    if isinstance(item, _TORCHS) or package.startswith(_LOOKED_INTO):
        return "object"
    passed = package.partition(".")[0] in _PASSED_BY or not (hasattr(item, "__dict__") or _slots(its_class))
    return "other" if passed else "object"


def attributes(item: Any) -> dict[str, Any]:
    """Attributes of an object that carry state."""
    held = {name: getattr(item, name) for name in _slots(cast(type, type(item))) if hasattr(item, name)}
    held |= getattr(item, "__dict__", {})
    if isinstance(item, nn.Module):
        return {name: value for name, value in held.items() if name not in _OF_MODULES or name in _STATE_OF_MODULES}
    if isinstance(item, Optimizer):
        return {name: value for name, value in held.items() if name not in _of_optimizers()}
    return held


@lru_cache(maxsize=4096)
def _of_frameworks(kind: type) -> frozenset[str]:
    """Private names that Lightning's classes among the bases use for themselves (ids of objects, the Trainer)."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")]
    methods = [getattr(method, "fget", method) for base in bases for method in vars(base).values()]
    names = (name for method in methods for name in getattr(getattr(method, "__code__", None), "co_names", ()))
    return frozenset(name for name in names if name.startswith("_"))


@lru_cache(maxsize=1)
def _of_optimizers() -> frozenset[str]:
    """Attributes that every optimizer has, and what schedulers put there. Not made at import: the first optimizer of a process
    has torch read the variables of its compiler."""
    return frozenset({*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), "step", "_opt_called", "_step_count"})


def _children(item: Any, kind: Kind, *, covered: bool) -> Children:
    if kind in ("list", "tuple"):
        return dict(enumerate([*item]))
    if kind == "dict":
        return dict(item)
    if covered:
        its_class: type = type(item)
        theirs = _OF_MODULES | _of_frameworks(its_class)
        return {name: value for name, value in vars(item).items() if name not in theirs}
    if kind == "object":
        return attributes(item)
    if isinstance(item, MethodType):
        return {"__self__": item.__self__}
    if isinstance(item, partial):
        return {"args": item.args, "keywords": item.keywords, "func": item.func}
    return {}


def _mark(item: Any, kind: Kind) -> Any:
    if kind == "tensor":
        return _mark_of_tensor(item)
    if kind == "array":
        return item.shape, item.dtype.str, _array_digest(item)
    if kind == "generator":
        tensors, data = encode(GeneratorState(item).state_dict(), where="generator")
        return data, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    if kind == "set":
        return frozenset(item)
    return _mark_of_sealed(item) if kind == "sealed" else None


def _mark_of_sealed(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return version_of(item)
    if isinstance(item, np.ndarray):
        return None if isinstance(item, np.memmap) else [*map(id, item.reshape(-1)[:_SMALL])]
    if isinstance(item, GeneratorType):
        frame = item.gi_frame
        return frame and (frame.f_lasti, {name: value for name, value in frame.f_locals.items() if is_constant(value)})
    return _position(item)


def _position(iterator: Any) -> Any:
    """Of an iterator of Python's, without moving it; a new object where it does not tell."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            parts = iterator.__reduce__()
    except TypeError:
        return object()
    return _position_of(parts)


def _position_of(part: Any) -> Any:
    if type(part) is tuple:
        return [*map(_position_of, part)]
    if is_constant(part):
        return part
    return _position(part) if hasattr(type(part), "__next__") else id(part)


def _mark_of_tensor(tensor: torch.Tensor) -> Any:
    if type(tensor) not in PLAIN_TENSORS:
        return None
    form = tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
    if tensor.is_cpu and tensor.nbytes <= _SMALL:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return *form, _digest(flat.view(torch.uint8).numpy()) if flat.numel() else ""
    return *form, tensor.data_ptr(), version_of(tensor)


def _array_digest(array: np.ndarray[Any, Any]) -> str:
    flat = array.reshape(-1)[:: max(1, -(-array.nbytes // _WHOLE))]
    return _digest(np.ascontiguousarray(flat).view(np.uint8)) if array.size else ""


def _digest(flat: np.ndarray[Any, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(flat.data)


@lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    found = (vars(one).get("__slots__", ()) for one in kind.__mro__)
    names = (name for slots in found for name in ((slots,) if isinstance(slots, str) else slots))
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


@lru_cache(maxsize=4096)
def is_users(kind: type) -> bool:
    """Whether a class is neither Python's nor an installed package's."""
    if kind.__module__ == "__main__" or kind in _USERS:
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not any(Path(file).is_relative_to(folder) for folder in _installed())


@lru_cache(maxsize=1)
def _installed() -> tuple[Path, ...]:
    return tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def same(old: Any, new: Any) -> bool:
    """The same object, or an equal constant."""
    if old is new:
        return True
    if isinstance(old, MethodType):
        return isinstance(new, MethodType) and old.__func__ is new.__func__ and old.__self__ is new.__self__
    if type(old) is not type(new) or not is_constant(new):
        return False
    return repr(old) == repr(new) if isinstance(new, (float, complex, np.generic, tuple)) else bool(old == new)


def same_children(old: Children, new: Children) -> bool:
    """Whether both have the same keys in the same order, and the same values under them."""
    return [*old] == [*new] and all(same(old[key], value) for key, value in new.items())
