"""A walk through the attributes of objects and what they hold, which finds every object once, by its shortest path.

It goes through three regions, one after the other, and an object belongs to the first in which it is found:

- ``own``: attributes of modules, optimizers, data sets and tasks. What changes is stored, or named where that cannot be.
- ``registered``: objects that are saved by themselves, by what they say in ``state_dict``.
- ``shared``: variables of the job's modules and classes, and what functions keep. What changes is named.

Looked into are containers, modules, optimizers, schedulers, data sets, bound methods, ``functools.partial``, functions and
classes of the user's, and objects of any other class. Those of installed packages are not ``users``: none is made anew, and of
shared ones only tensors, arrays and generators count. Not looked into is what ``_PASSED_BY`` lists: the frameworks themselves,
loggers, threads, files.
"""

from __future__ import annotations

import io
import sys
import sysconfig
import threading
import warnings
from argparse import Namespace
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path, PurePath
from types import (
    BuiltinMethodType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)  # fmt: skip
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast
from uuid import UUID
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ratchet_hooks.codec import encode
from ratchet_hooks.torch_compat import own_buffers, storage_id, tensor_hooks, version_of
from ratchet_worker.rng import GeneratorState, is_generator, process_wide

Kind: TypeAlias = Literal[
    "tensor", "array", "generator", "bytes", "list", "tuple", "dict", "set", "object", "bound", "function", "class", "module",
    "sealed", "other",
]  # fmt: skip
"""``bytes``: a ``bytearray`` or an ``array.array``; ``sealed``: has a state that cannot be stored; ``bound``: a bound method, a
partial, and other things that only hold others; ``module``: the variables of a module of Python's; ``other``: code of installed
packages, or passed by."""
Region: TypeAlias = Literal["own", "registered", "shared"]
Children: TypeAlias = dict[Any, Any]
"""By index, key or name."""

PLAIN_TENSORS: Final = (torch.Tensor, nn.Parameter)
VALUES: Final = (Decimal, Fraction, date, time, timedelta, UUID, PurePath)
"""Constants of Python's library."""
_PLAIN: Final = frozenset({int, float, complex, str, bytes, bool, type(None)})
_CONSTANTS: Final = (
    int, float, complex, str, bytes, type(None), np.generic, Enum, torch.dtype, torch.device, torch.Size, torch.memory_format,
    range, slice, *VALUES,
)  # fmt: skip
_CONTAINERS: Final[dict[Kind, tuple[type, ...]]] = {
    "list": (list, deque), "tuple": (tuple,), "dict": (dict,), "set": (set, frozenset)
}  # fmt: skip
_PASSED_BY: Final = frozenset({
    "torch", "lightning", "pytorch_lightning", "lightning_utilities", "accelerate", "ratchet_worker", "ratchet_hooks",
    "ratchet_contract", "ratchet_store", "ratchet",
    "logging", "threading", "_thread", "io", "_io", "weakref", "concurrent", "multiprocessing", "asyncio",
    "re", "pathlib", "abc", "inspect", "warnings", "wandb", "tensorboard", "mlflow", "comet_ml", "neptune", "tqdm", "rich",
    "builtins", "typing", "socket", "queue", "contextlib", "functools", "sqlite3", "tempfile", "subprocess", "datetime",
    "decimal", "fractions", "uuid", "ctypes", "mmap", "operator", "importlib", "numpy", "unittest",
})  # fmt: skip
_LOOKED_INTO: Final = ("torch.utils.data", "torch.quasirandom", "torch.distributions", "numpy.polynomial", "queue")
_LOOKED_INTO_WHERE_REGISTERED: Final = (
    "lightning", "pytorch_lightning", "accelerate", "ratchet_worker.integrations"
)  # fmt: skip
_POSITIONS: Final = ("ratchet_worker.data.", "ratchet_worker.session", "ratchet_worker.epoch_loop")
"""Whose positions are restored."""
_USERS: Final = (SimpleNamespace, Namespace)
"""Classes of Python whose objects are as a user's."""
_TORCHS: Final = (nn.Module, Optimizer, LRScheduler)
_OF_MODULES: Final = frozenset(vars(nn.Module()))
_HOLDERS: Final = (
    MethodType, partial, BuiltinMethodType, MappingProxyType, ContextVar, memoryview, WeakKeyDictionary, WeakValueDictionary,
    WeakSet,
)  # fmt: skip
_STATE_OF_MODULES: Final = frozenset({"training", "_parameters", "_buffers", "_modules"})
_HOOKS_OF_MODULES: Final = _OF_MODULES - _STATE_OF_MODULES
_MOST: Final = 200_000
"""Objects that are looked at."""
_LARGE: Final = 20_000
"""Items of a container up to which each is looked at; of a larger one the number of items and a sample of them."""
_SAMPLE: Final = 1000
_WHOLE: Final = 256 << 20
"""Bytes of an array up to which all of it is compared; of a larger one a part of about so many."""
_BLOCK: Final = 64 << 10
"""Bytes that lie together in such a part."""
_ITEMS: Final = 64 << 10
"""Of an array of objects, those that are compared."""
SMALL: Final = 16 << 20
"""Bytes of a tensor on the CPU up to which its elements are compared; for a larger one torch counts changes."""


@dataclass(frozen=True)
class Node:
    """One object at one time. ``mark``: what a leaf is compared by; ``children``: what others hold. ``users``: it is the
    script's, so that it can be changed and made. ``covered``: a tensor that is saved by itself."""

    item: Any
    kind: Kind
    mark: Any
    children: Children
    users: bool
    region: Region
    covered: bool = False


@dataclass
class Walked:
    """``nodes``: by path; ``paths``: by the id of their objects; ``places``: by storage, the path of a covered tensor;
    ``left_out``: the paths that were left out; ``failed``: those of objects that raise when they are looked at; ``around``: ids
    of optimizers whose state is saved by itself;
    ``library_hooks``: how many hooks of libraries are registered; ``complete``: there was no more to be looked at."""

    nodes: dict[str, Node] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    around: set[int] = field(default_factory=set)
    library_hooks: int = 0
    complete: bool = True

    def path_of(self, item: Any) -> str | None:
        path = self.paths.get(id(item))
        return path if path is not None and self.nodes[path].item is item else None


@dataclass(frozen=True)
class Roots:
    """Where the walk begins, by path, region by region. A module of ``own`` is one whose parts, parameters and buffers are saved
    by themselves. ``spoken``: of some, by path, the attributes that their ``state_dict`` speaks of, which are left to it.
    ``around``: see ``Walked``."""

    own: Mapping[str, Any] = field(default_factory=dict)
    registered: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    spoken: Mapping[str, frozenset[str]] = field(default_factory=dict)
    around: frozenset[int] = frozenset()


def walk(roots: Roots, left_out: Collection[str] = ()) -> Walked:
    """``left_out``: paths that are not looked into."""
    states = [vars(item).get("state") for item in roots.own.values() if isinstance(item, Optimizer)]
    walker = _Walker(left_out, {*map(id, (*process_wide(), *roots.registered.values(), *states))}, roots.spoken)
    walker.found.around |= {*roots.around, *map(id, (*roots.own.values(), *roots.registered.values()))}
    walker.apart = {*map(id, roots.own.values())}
    walker.run("own", roots.own)
    walker.passed = {*map(id, process_wide())}
    walker.run("registered", roots.registered)
    walker.shared |= roots.shared
    walker.run("shared", {})
    return walker.found


class _Found(NamedTuple):
    """Before it is looked at."""

    path: str
    item: Any
    users: bool = True
    covered: bool = False


class _Walker:
    """Breadth first through one region after the other. ``passed``: ids of what is not looked at; ``shared``: what was met that
    belongs to the last region."""

    def __init__(self, left_out: Collection[str], passed: set[int], spoken: Mapping[str, frozenset[str]]) -> None:
        self.found, self.passed, self.shared = Walked(), passed, dict[str, Any]()
        self._left_out, self._spoken = left_out, spoken
        self.apart = set[int]()  # ids of roots
        self._waiting = deque[_Found]()

    def run(self, region: Region, roots: Mapping[str, Any]) -> None:
        covered = region == "own"
        self._waiting.extend(
            _Found(path, item, covered=covered and isinstance(item, nn.Module)) for path, item in roots.items()
        )
        while self.found.complete and (self._waiting or (region == "shared" and self.shared)):
            if not self._waiting:
                self._waiting.extend(_Found(path, item) for path, item in self.shared.items())
                self.shared.clear()
            one = self._waiting.popleft()
            known = id(one.item) in self.found.paths or id(one.item) in self.passed
            if not known and not self._is_left_out(one.path):
                try:
                    self._look_at(one, region)
                except Exception:  # a user's property, a dead proxy, a structure too deep
                    self.found.failed.add(one.path)

    def _look_at(self, one: _Found, region: Region) -> None:
        path, item = one.path, one.item
        kind = _kind(item, region)
        if kind in ("function", "class", "bound") and region == "registered":
            return  # a state_dict does not say what they keep
        if kind in ("function", "class") and region == "own":
            self.shared.setdefault(path if kind == "function" else name_of(item), item)
            return
        if len(self.found.nodes) == _MOST:
            self.found.complete = False
            return
        its_class: type = type(item)
        users = one.users and (kind != "object" or isinstance(item, _TORCHS) or is_users(its_class))
        children = _children(item, kind, covered=one.covered)
        if kind == "dict":
            children = {self._named_by_address(key): child for key, child in children.items()}
        if isinstance(item, Optimizer) and region == "own":
            children |= self._of_inner(item)
        if names := self._spoken.get(path):
            children = {name: child for name, child in children.items() if name not in names}
        if self._left_out:
            children = {k: child for k, child in children.items() if not self._is_left_out(f"{path}{step(kind, k)}")}
        self.found.paths[id(item)] = path
        mark = None if region == "registered" else _mark(item, kind)
        self.found.nodes[path] = Node(item, kind, mark, children, users, region)
        if one.covered:
            self._look_at_parts(path, item)
        self._waiting.extend(
            _Found(f"{path}{step(kind, key)}", child, users)
            for key, child in children.items()
            if not is_constant(child) and not isinstance(child, ModuleType)
        )
        if kind == "object" and region != "registered":
            for name, hook in _hooks(item):
                self._waiting.append(_Found(f"{path}.{name}", hook, users))
                self.found.library_hooks += not is_users_code(hook)
            self.shared |= {name_of(base): base for base in _users_bases(its_class)}

    def _look_at_parts(self, path: str, module: nn.Module) -> None:
        buffers = () if id(own_buffers(module)) in self.apart else module.named_buffers(recurse=False)
        for name, tensor in (*module.named_parameters(recurse=False), *buffers):
            self._cover(f"{path}.{name}", tensor)
        parts = (_Found(f"{path}.{name}", part, covered=True) for name, part in module.named_children())
        self._waiting.extendleft(reversed([*parts]))

    def _cover(self, path: str, tensor: torch.Tensor) -> None:
        found = self.found
        if id(tensor) in found.paths:
            return
        found.paths[id(tensor)] = path
        hooks = [(f"hooks[{number}]", hook) for number, hook in enumerate(tensor_hooks(tensor))]
        mark, kept = {name: hook for name, hook in hooks if is_users_code(hook)}, _attributes_of_tensor(tensor)
        found.nodes[path] = Node(tensor, "tensor", mark, kept, users=False, region="own", covered=True)
        if tensor.layout is torch.strided and tensor.numel():
            found.places.setdefault(storage_id(tensor), path)
        self._waiting.extend(
            _Found(f"{path}.{name}", one) for name, one in (*hooks, *kept.items()) if not is_constant(one)
        )

    def _of_inner(self, optimizer: Optimizer) -> Children:
        """The state of an optimizer within another one, unless that is the other one's."""
        held = vars(optimizer)
        if id(held.get("state")) in self.passed:
            self.found.around.add(id(optimizer))
        if id(optimizer) in self.found.around:
            return {}
        return {name: held[name] for name in ("state", "param_groups") if name in held}

    def _named_by_address(self, key: Any) -> Any:
        """A key that is the ``id`` of an object: by the object's path, which is the same in every process."""
        path = self.found.paths.get(key) if type(key) is int else None
        return key if path is None else AddressKey(path)

    def _is_left_out(self, path: str) -> bool:
        if path not in self._left_out:
            return False
        self.found.left_out.add(path)
        return True


def step(kind: Kind, key: Any) -> str:
    """How a path goes on from an object of this kind to what it holds under ``key``."""
    if kind == "module":
        return str(key)
    return f".{key}" if kind in ("object", "bound", "function", "class", "tensor", "generator") else f"[{key!r}]"


class ObjectKey:
    """A key of a dictionary that is no constant, by its place."""

    def __init__(self, number: int, item: Any) -> None:
        self.number, self.item = number, item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and self.number == other.number and self.item is other.item

    def __hash__(self) -> int:
        return hash((self.number, id(self.item)))

    def __repr__(self) -> str:
        return f"#{self.number}"


@dataclass(frozen=True)
class AddressKey:
    """A key of a dictionary that is the ``id`` of the object at ``path``."""

    path: str

    def __repr__(self) -> str:
        return f"id({self.path})"


def is_constant(item: Any) -> bool:
    """A value that cannot change, or a tuple of such."""
    if type(item) in _PLAIN:
        return True
    if type(item) is tuple:
        try:
            return all(map(is_constant, item))
        except RecursionError:  # tuples in tuples: they are looked at one by one
            return False
    return isinstance(item, _CONSTANTS) and (isinstance(item, Enum) or not getattr(item, "__dict__", None))


def name_of(item: Any) -> str:
    """The path of a class: ``module:Class``."""
    return f"{item.__module__}:{item.__qualname__}"


def _kind(item: Any, region: Region) -> Kind:
    if isinstance(item, torch.Tensor):
        return "tensor" if item.layout is torch.strided else "sealed"
    if isinstance(item, np.ndarray):
        return "array" if item.dtype.kind in "biufcSUmM" and not isinstance(item, np.memmap) else "sealed"
    if is_generator(item):
        return "generator"
    if isinstance(item, (bytearray, array)):
        return "bytes"
    for kind, types in _CONTAINERS.items():
        if isinstance(item, types):
            return kind
    if isinstance(item, _HOLDERS):
        return "bound"
    if isinstance(item, threading.local):
        return "object"
    if isinstance(item, FunctionType):
        return "function" if is_users_module(str(item.__module__)) else "other"
    if isinstance(item, type):
        return "class" if is_users(item) and not issubclass(item, Enum) else "other"
    if isinstance(item, ModuleType):
        return "module"
    if isinstance(item, (np.random.SeedSequence, torch.UntypedStorage)) or (
        isinstance(item, io.IOBase) and _is_read(item)
    ):
        return "sealed"
    if isinstance(item, GeneratorType):
        return "other" if _is_passed(_owner_of(item)) else "sealed"
    if hasattr(type(item), "__next__") and not hasattr(item, "__dict__"):
        return "other" if hasattr(item, "fileno") else "sealed"
    its_class = cast(type, type(item))
    package = its_class.__module__
    if isinstance(item, _TORCHS) or package.startswith(_LOOKED_INTO):
        return "object"
    if region == "registered" and package.startswith(_LOOKED_INTO_WHERE_REGISTERED):
        return "object"
    return "other" if _is_passed(package) or not (hasattr(item, "__dict__") or slots_of(its_class)) else "object"


def _is_read(file: io.IOBase) -> bool:
    """A file that is only written into moves nothing."""
    with suppress(ValueError):  # closed
        return file.readable() and (isinstance(file, (io.BytesIO, io.StringIO)) or not file.writable())
    return False


def _is_passed(module: str) -> bool:
    return module.partition(".")[0] in _PASSED_BY and not module.startswith(_LOOKED_INTO)


def _owner_of(generator: GeneratorType[Any, Any, Any]) -> str:
    """The module whose code a generator object runs; that of a Session or of registered data, where it reads these."""
    frame = generator.gi_frame
    if frame is None:
        return ""
    held = (str(type(value).__module__) for value in frame.f_locals.values())
    return next((module for module in held if module.startswith(_POSITIONS)), str(frame.f_globals.get("__name__")))


def _hooks(item: Any) -> Iterator[tuple[str, Any]]:
    """What is registered on a module or an optimizer to be called."""
    names = (
        _HOOKS_OF_MODULES if isinstance(item, nn.Module) else _of_optimizers() if isinstance(item, Optimizer) else ()
    )
    attributes_of_item = vars(item) if names else {}
    for name in names:
        held = attributes_of_item.get(name)
        if isinstance(held, OrderedDict) and held:
            yield from ((f"{name}[{n}]", hook) for n, hook in enumerate(held.values()) if callable(hook))


def _registered_code(item: Any) -> dict[str, Any]:
    """Of a module its parts; of a module or an optimizer, by table, the user's functions that are called."""
    if not isinstance(item, (nn.Module, Optimizer)):
        return {}
    found: dict[str, Any] = {"parts": dict(item.named_children())} if isinstance(item, nn.Module) else {}
    for name, hook in _hooks(item):
        if is_users_code(hook):
            found.setdefault(name.partition("[")[0], []).append(hook)
    return found


def is_users_code(item: Any) -> bool:
    """Whether a function, a method or a class is the user's."""
    return isinstance(item, (FunctionType, MethodType, type)) and is_users_module(str(item.__module__))


@lru_cache(maxsize=4096)
def _users_bases(kind: type) -> tuple[type, ...]:
    return tuple(base for base in kind.__mro__ if is_users(base) and base not in _USERS and not issubclass(base, Enum))


def attributes(item: Any) -> dict[str, Any]:
    """Attributes of an object that carry state."""
    held = {name: getattr(item, name) for name in slots_of(cast(type, type(item))) if hasattr(item, name)}
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


def _is_large(item: Any, kind: Kind) -> bool:
    return kind in ("list", "tuple", "dict") and len(item) > _LARGE


def _children(item: Any, kind: Kind, *, covered: bool) -> Children:
    if _is_large(item, kind):
        return {}
    if kind in ("list", "tuple"):
        return dict(enumerate([*item]))
    if kind == "dict":
        held = enumerate(item.items())
        return {key if is_constant(key) else ObjectKey(number, key): value for number, (key, value) in held}
    if kind == "set":
        objects = [one for one in item if not is_constant(one)]
        return dict(enumerate(objects)) if len(objects) == 1 else {}  # of several, the order is another in each process
    if kind == "tensor":
        return _kept_by_tensor(item)
    if covered:
        its_class: type = type(item)
        theirs = _OF_MODULES | _of_frameworks(its_class)
        return {name: value for name, value in vars(item).items() if name not in theirs}
    if kind == "object":
        return attributes(item)
    if kind == "function":
        return _kept_by(item)
    if kind in ("class", "module"):
        plain = {name: value for name, value in vars(item).items() if not name.startswith("__")}
        return {n: v.__func__ if isinstance(v, (classmethod, staticmethod)) else v for n, v in plain.items()}
    if kind == "generator":
        return {name: value for name, value in getattr(item, "__dict__", {}).items() if name != "gauss_next"}
    return _held_by(item) if kind == "bound" else {}


def _held_by(item: Any) -> Children:
    if isinstance(item, partial):
        return {"args": item.args, "keywords": item.keywords, "func": item.func}
    if isinstance(item, MappingProxyType):
        return dict(item)
    if isinstance(item, ContextVar):
        return {"value": item.get(None)}
    if isinstance(item, (WeakKeyDictionary, WeakValueDictionary, WeakSet)):
        return dict(enumerate([*item] if isinstance(item, WeakSet) else [*item.values()]))
    if isinstance(item, memoryview):
        return {"obj": item.obj}
    return {"__self__": item.__self__}


def _attributes_of_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Without the marks of torch's compiler, which a process that resumes makes anew, when it compiles."""
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_dynamo_")}


def _kept_by_tensor(tensor: torch.Tensor) -> Children:
    """Attributes of a tensor, and the gradient of one that is trained by hand."""
    kept = _attributes_of_tensor(tensor)
    if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
        kept["grad"] = tensor.grad
    return kept


def _kept_by(function: FunctionType) -> Children:
    """What a function keeps from call to call: defaults, its own attributes, and variables around it."""
    code = function.__code__
    defaults, names = function.__defaults__ or (), code.co_varnames[: code.co_argcount]
    kept = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            kept[name] = cell.cell_contents
    return kept | vars(function)


def _mark(item: Any, kind: Kind) -> Any:
    if kind == "tensor":
        return _mark_of_tensor(item)
    if kind == "array":
        return item.shape, item.dtype.str, _array_digest(item)
    if kind == "generator":
        tensors, data = encode(GeneratorState(item).state_dict(), where="generator")
        return data, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    if kind == "set":
        constant = all(map(is_constant, item))
        return frozenset(item) if constant else [(id(one), _mark(one, _kind(one, "own"))) for one in item]
    if kind == "bytes":
        return bytes(item)
    if _is_large(item, kind):
        return _mark_of_large(item)
    if kind == "object":
        return type(item), _registered_code(item)
    return _mark_of_sealed(item) if kind == "sealed" else None


def _mark_of_large(item: Any) -> Any:
    """How many items a container has, and a sample of them: constants, and what else is there by its identity."""
    every = -(-len(item) // _SAMPLE)
    found = islice(item.items() if isinstance(item, dict) else item, 0, None, every)
    return len(item), [repr(one) if is_constant(one) else _shallow(one) for one in (*found, *_last(item))]


def _last(item: Any) -> list[Any]:
    return [*islice(reversed(item.items() if isinstance(item, dict) else item), 1)]


def _shallow(item: Any) -> Any:
    """The identity of an item and, of a container, of what it holds."""
    held = [*(item.items() if isinstance(item, dict) else item)] if isinstance(item, (list, dict, tuple)) else []
    return id(item), [repr(one) if is_constant(one) else id(one) for one in held[:_SAMPLE]]


def _mark_of_sealed(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return version_of(item)
    if isinstance(item, np.ndarray):
        return [*map(id, item.reshape(-1)[:_ITEMS])] if item.dtype.hasobject else _array_digest(item)
    if isinstance(item, np.random.SeedSequence):
        return repr(item.state)
    if isinstance(item, torch.UntypedStorage):
        return _mark_of_tensor(torch.empty(0, dtype=torch.uint8, device=item.device).set_(item))
    if isinstance(item, io.IOBase):
        return _mark_of_file(item)
    if isinstance(item, GeneratorType):
        frame = item.gi_frame
        return frame and (frame.f_lasti, {name: value for name, value in frame.f_locals.items() if is_constant(value)})
    return _position(item)


def _mark_of_file(file: Any) -> Any:
    """Where it is read, and what one in memory holds."""
    held = file.getvalue() if isinstance(file, (io.BytesIO, io.StringIO)) else None
    places: tuple[Any, ...] = (file, getattr(file, "buffer", None))
    for one in places:  # a text file that is iterated over does not tell
        with suppress(OSError, AttributeError):
            return one.tell(), held
    return held


def _position(iterator: Any) -> Any:
    """Of an iterator of Python's, without moving it; a new object where it does not tell."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            parts = iterator.__reduce__()
    except Exception:  # whatever the iterator's own code raises
        return object()
    return _position_of(parts)


def _position_of(part: Any) -> Any:
    if type(part) is tuple:
        return [*map(_position_of, part)]
    if is_constant(part):
        return part
    return _position(part) if hasattr(type(part), "__next__") else id(part)


def _mark_of_tensor(tensor: torch.Tensor) -> Any:
    if type(tensor) not in PLAIN_TENSORS or tensor.is_quantized:
        return version_of(tensor)
    form = tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
    if tensor.is_cpu and tensor.nbytes <= SMALL:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return *form, _digest(flat.view(torch.uint8).numpy()) if flat.numel() else ""
    return *form, tensor.data_ptr(), version_of(tensor)


def _array_digest(array: np.ndarray[Any, Any]) -> str:
    if not array.size:
        return ""
    flat = np.ascontiguousarray(array.reshape(-1, order="A")).view(np.uint8)  # of a transposed one without a copy
    if flat.nbytes <= _WHOLE:
        return _digest(flat)
    blocks = flat[: flat.nbytes // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    return _digest(np.ascontiguousarray(blocks[:: -(-flat.nbytes // _WHOLE)]).reshape(-1))


def _digest(flat: np.ndarray[Any, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(flat.data)


@lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """Under the names by which they are found."""
    names: list[str] = []
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{one.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def is_users(kind: type) -> bool:
    """Whether a class is neither Python's nor an installed package's."""
    return kind in _USERS or is_users_module(kind.__module__)


@lru_cache(maxsize=4096)
def is_users_module(name: str) -> bool:
    """Whether the code of a module is neither Python's nor an installed package's."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or file is None:
        return name == "__main__"
    return not _is_passed(name) and not any(Path(file).is_relative_to(folder) for folder in _installed())


@lru_cache(maxsize=1)
def _installed() -> tuple[Path, ...]:
    places = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(places | {Path(one) for one in sys.path if Path(one).name in ("site-packages", "dist-packages")})


def same(old: Any, new: Any) -> bool:
    """The same object, or an equal constant."""
    if old is new:
        return True
    if isinstance(old, MethodType):
        return isinstance(new, MethodType) and old.__func__ is new.__func__ and old.__self__ is new.__self__
    if type(old) is not type(new) or not is_constant(new):
        return False
    return repr(old) == repr(new) if isinstance(new, (float, complex, np.generic, tuple, *VALUES)) else bool(old == new)


def same_children(old: Children, new: Children) -> bool:
    """Whether both have the same keys in the same order, and the same values under them."""
    return [*old] == [*new] and all(same(old[key], value) for key, value in new.items())
