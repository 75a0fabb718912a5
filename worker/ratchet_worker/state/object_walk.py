"""A walk through the attributes of objects and the objects that they hold. It visits an object at most once, region by region:

- ``own``: attributes of modules, optimizers, data sets and tasks. Most changes can be stored; others may be reported by path.
- ``registered``: objects that are saved separately, through their ``state_dict``.
- ``unordered``: objects that only a set in ``own`` reaches; a set's order differs between processes. Changes are not stored;
  they may be reported by path.
- ``shared``: variables of the job's modules and classes, and what functions keep between calls. Changes are not stored;
  they may be reported by path.
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
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain, islice
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
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args
from uuid import UUID
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ratchet_hooks.state.encode import encode
from ratchet_hooks.torch_compat import own_buffers, storage_id, tensor_hooks, version_of
from ratchet_worker.state.rng import Generator, GeneratorState, is_generator, process_generators

Kind: TypeAlias = Literal[
    "tensor", "array", "generator", "bytes", "list", "tuple", "dict", "set", "object", "bound", "function", "class", "module",
    "sealed", "other",
]  # fmt: skip
"""``bytes``: a ``bytearray`` or an ``array.array``; ``sealed``: has a state that cannot be stored; ``bound``: a bound method, a
partial, or another object that only holds others; ``module``: the variables of a Python module; ``other``: code of installed
packages, or not entered."""
Region: TypeAlias = Literal["own", "registered", "unordered", "shared"]
Children: TypeAlias = dict[Any, Any]
"""By index, key or name."""

UNORDERED: Final = "\0"
"""Separates the path of a set from the number of one of its several objects."""
PLAIN_TENSORS: Final = (torch.Tensor, nn.Parameter)
VALUES: Final = (Decimal, Fraction, date, time, timedelta, UUID, PurePath)
"""Constants of Python's standard library."""
_PLAIN: Final = frozenset({int, float, complex, str, bytes, bool, type(None)})
_CONSTANTS: Final = (
    int, float, complex, str, bytes, type(None), np.generic, Enum, torch.dtype, torch.device, torch.Size, torch.memory_format,
    range, slice, *VALUES,
)  # fmt: skip
_CONTAINERS: Final[dict[Kind, tuple[type, ...]]] = {
    "list": (list, deque), "tuple": (tuple,), "dict": (dict,), "set": (set, frozenset)
}  # fmt: skip
_PYTHON_TYPES: Final[dict[type, Kind]] = {
    **{kind: name for name, kinds in _CONTAINERS.items() for kind in kinds}, OrderedDict: "dict", bytearray: "bytes",
    MethodType: "bound", partial: "bound",
}  # fmt: skip
"""The kind of all objects of exactly this class: found without a check of every other class."""
_NOT_CONSTANTS: Final = frozenset({*_PYTHON_TYPES, *PLAIN_TENSORS, FunctionType, ModuleType} - {tuple})
"""Classes; ``is_constant`` returns False for objects of exactly one of these."""
_EXCLUDED_PACKAGES: Final = frozenset({
    "torch", "lightning", "pytorch_lightning", "lightning_utilities", "accelerate", "ratchet_worker", "ratchet_hooks",
    "ratchet_contract", "ratchet_store", "ratchet",
    "logging", "threading", "_thread", "io", "_io", "weakref", "concurrent", "multiprocessing", "asyncio",
    "re", "pathlib", "abc", "inspect", "warnings", "wandb", "tensorboard", "mlflow", "comet_ml", "neptune", "tqdm", "rich",
    "builtins", "typing", "socket", "queue", "contextlib", "functools", "sqlite3", "tempfile", "subprocess", "datetime",
    "decimal", "fractions", "uuid", "ctypes", "mmap", "operator", "importlib", "numpy", "unittest",
})  # fmt: skip
_INCLUDED_MODULES: Final = ("torch.utils.data", "torch.quasirandom", "torch.distributions", "numpy.polynomial", "queue")
_INCLUDED_IF_REGISTERED: Final = (
    "lightning", "pytorch_lightning", "accelerate", "ratchet_worker.integrations"
)  # fmt: skip
_POSITION_MODULES: Final = (
    "ratchet_worker.data.",
    "ratchet_worker.session.session",
    "ratchet_worker.training.epoch_loop",
)
"""Modules of classes whose positions are restored."""
_USER_LIKE_TYPES: Final = (SimpleNamespace, Namespace)
"""Python's classes whose objects are treated like a user's."""
_TORCH_TYPES: Final = (nn.Module, Optimizer, LRScheduler)
_MODULE_ATTRIBUTES: Final = frozenset(vars(nn.Module()))
_HOLDERS: Final = (
    MethodType, partial, BuiltinMethodType, MappingProxyType, ContextVar, memoryview, WeakKeyDictionary, WeakValueDictionary,
    WeakSet,
)  # fmt: skip
_SPECIAL_TYPES: Final = (
    torch.Tensor, np.ndarray, *get_args(Generator), bytearray, array, *chain.from_iterable(_CONTAINERS.values()), *_HOLDERS,
    threading.local, FunctionType, type, ModuleType, np.random.SeedSequence, torch.UntypedStorage, io.IOBase, GeneratorType,
)  # fmt: skip
"""Classes whose objects have a ``Kind`` of their own, or one for which ``_special_kind`` looks at the object."""
_MODULE_STATE_ATTRIBUTES: Final = frozenset({"training", "_parameters", "_buffers", "_modules"})
_MODULE_HOOK_ATTRIBUTES: Final = tuple(sorted(_MODULE_ATTRIBUTES - _MODULE_STATE_ATTRIBUTES))
_MAX_OBJECTS: Final = 200_000
"""Largest number of objects that a walk visits."""
_LARGE_ITEMS: Final = 20_000
"""Of a list, tuple or dictionary with more items, only the number of items and a sample of them are compared."""
_SAMPLE: Final = 1000
_INNER: Final = 32
_FULLY_COMPARED_BYTES: Final = 256 << 20
"""An array of up to this many bytes is compared as a whole; of a larger one, a part of at most about this size."""
_BLOCK: Final = 64 << 10
"""Contiguous bytes in such a part."""
_MAX_ARRAY_ITEMS: Final = 64 << 10
"""Largest number of items of an array of objects that are compared."""
SMALL: Final = 16 << 20
"""The elements of a plain CPU tensor of up to this many bytes are compared; for other tensors, torch's count of changes is."""


class Node(NamedTuple):  # a save may make thousands; a frozen dataclass takes more than twice as long
    """One object as a walk has found it. ``mark``: what two walks compare in addition to ``children``. ``children``: the objects
    that this object holds. ``from_user``: False for most objects of packages and what they hold. ``covered``: True for a
    parameter or buffer that is saved separately."""

    item: Any
    kind: Kind
    mark: Any
    children: Children
    from_user: bool
    region: Region
    covered: bool = False


@dataclass
class Walked:
    """The result of a walk. ``nodes``: the nodes by path. ``paths``: the paths by the ``id`` of the object. ``storage_paths``:
    the paths of tensors that are saved separately, by storage. ``failed``: paths of objects that raise when they are visited.
    ``complete``: False if the walk has stopped early."""

    nodes: dict[str, Node] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    storage_paths: dict[int, str] = field(default_factory=dict)
    ignored_paths: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    separate_optimizers: set[int] = field(default_factory=set)
    library_hooks: int = 0
    complete: bool = True

    def path_of(self, item: Any) -> str | None:
        """Return the path of ``item``; None if the walk has not found this very object."""
        path = self.paths.get(id(item))
        return path if path is not None and self.nodes[path].item is item else None


@dataclass(frozen=True)
class Roots:
    """The objects from which a walk starts, by path, for three of its regions. ``covered_attributes``: by path of an object,
    names of attributes that the walk leaves out, since the object's ``state_dict`` covers them."""

    own: Mapping[str, Any] = field(default_factory=dict)
    registered: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    covered_attributes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    separate_optimizers: frozenset[int] = frozenset()


def walk(roots: Roots, ignored: Collection[str] = ()) -> Walked:
    """Return what a walk from ``roots`` finds. ``ignored``: paths that are not visited. Changes no object."""
    states = [vars(item).get("state") for item in roots.own.values() if isinstance(item, Optimizer)]
    walker = _Walker(
        ignored, {*map(id, (*process_generators(), *roots.registered.values(), *states))}, roots.covered_attributes
    )
    walker.result.separate_optimizers |= {
        *roots.separate_optimizers,
        *map(id, (*roots.own.values(), *roots.registered.values())),
    }
    walker.root_ids = {*map(id, roots.own.values())}
    walker.run("own", roots.own)
    walker.excluded_ids = {*map(id, process_generators())}
    walker.run("registered", roots.registered)
    walker.run("unordered", walker.unordered)
    walker.shared |= roots.shared
    walker.run("shared", {})
    return walker.result


class _Found(NamedTuple):
    """An object in the walk's queue, before it is visited. ``covered``: a module whose tensors and parts are saved separately."""

    path: str
    item: Any
    from_user: bool = True
    covered: bool = False


class _Walker:
    """Visits one region after the other. ``excluded_ids``: objects not to visit. ``unordered``, ``shared``: objects found for
    these regions."""

    def __init__(
        self, ignored: Collection[str], excluded_ids: set[int], covered_attributes: Mapping[str, frozenset[str]]
    ) -> None:
        self.result, self.excluded_ids = Walked(), excluded_ids
        self.unordered, self.shared = dict[str, Any](), dict[str, Any]()
        self._ignored, self._covered_attributes = ignored, covered_attributes
        self.root_ids = set[int]()  # ids of roots
        self._queue = deque[_Found]()

    def run(self, region: Region, roots: Mapping[str, Any]) -> None:
        """Visit what can be reached from ``roots`` in ``region``; in ``shared``, also from the objects collected for it. An
        object that raises is added to ``failed``."""
        covered, queue, paths, excluded_ids = region == "own", self._queue, self.result.paths, self.excluded_ids
        queue.extend(
            _Found(path, item, covered=covered and isinstance(item, nn.Module)) for path, item in roots.items()
        )
        while self.result.complete and (queue or (region == "shared" and self.shared)):
            if not queue:
                queue.extend(_Found(path, item) for path, item in self.shared.items())
                self.shared.clear()
            one = queue.popleft()
            number = id(one.item)
            if number not in paths and number not in excluded_ids and not self._is_ignored(one.path):
                try:
                    self._visit(one, region)
                except Exception:  # a user's property, a dead proxy, a structure too deep
                    self.result.failed.add(one.path)

    def _visit(self, one: _Found, region: Region) -> None:
        """Add one object's node, unless the walk leaves it out here, and queue most objects that it holds. Raises what the
        object's code raises."""
        path, item = one.path, one.item
        kind = _kind(item, region)
        if kind in ("function", "class", "bound") and region == "registered":
            return  # a state_dict does not contain what they keep
        if kind in ("function", "class") and region in ("own", "unordered"):
            self.shared.setdefault(path if kind == "function" else class_path(item), item)
            return
        if len(self.result.nodes) >= _MAX_OBJECTS:
            self.result.complete = False
            return
        its_class: type = type(item)
        users = one.from_user and (kind != "object" or isinstance(item, _TORCH_TYPES) or is_user_class(its_class))
        children = _children(item, kind, covered=one.covered)
        if kind == "dict":
            children = {self._address_key(key) if type(key) is int else key: child for key, child in children.items()}
        if isinstance(item, Optimizer) and region == "own":
            children |= self._inner_optimizer_state(item)
        if names := self._covered_attributes.get(path):
            children = {name: child for name, child in children.items() if name not in names}
        if self._ignored:
            children = {
                k: child for k, child in children.items() if not self._is_ignored(f"{path}{path_step(kind, k)}")
            }
        self.result.paths[id(item)] = path
        hooks = _hooks(item) if kind == "object" and region != "registered" else []
        mark = None if region == "registered" else _mark(item, kind, hooks)
        self.result.nodes[path] = Node(item, kind, mark, children, users, region)
        if one.covered:
            self._visit_parts(path, item)
        for key, child in children.items():
            if type(child) not in _PLAIN and not is_constant(child) and not isinstance(child, ModuleType):
                self._queue.append(_Found(f"{path}{path_step(kind, key)}", child, users))
        if kind == "set" and (several := _unordered(item)):
            found = [_Found(f"{path}{UNORDERED}{n}", child, users) for n, child in enumerate(several)]
            if region == "own":
                self.unordered |= {one.path: one.item for one in found}
            elif region != "registered":
                self._queue.extend(found)
        if kind == "object" and region != "registered":
            for name, hook in hooks:
                self._queue.append(_Found(f"{path}.{name}", hook, users))
                self.result.library_hooks += not is_user_code(hook)
            self.shared |= {class_path(base): base for base in _user_bases(its_class)}

    def _visit_parts(self, path: str, module: nn.Module) -> None:
        """Add nodes for a covered module's parameters. Also add nodes for its buffers, unless their table is a root of the walk.
        The module's parts go to the front of the queue."""
        for name, tensor in _own_tensors(module, "_parameters", "named_parameters"):
            self._cover(f"{path}.{name}", tensor)
        if id(own_buffers(module)) not in self.root_ids:
            for name, tensor in _own_tensors(module, "_buffers", "named_buffers"):
                self._cover(f"{path}.{name}", tensor)
        parts = [_Found(f"{path}.{name}", part, covered=True) for name, part in module.named_children()]
        self._queue.extendleft(reversed(parts))

    def _cover(self, path: str, tensor: torch.Tensor) -> None:
        """Add the node of a tensor that is saved separately, unless it has one, and queue its hooks and attributes."""
        found = self.result
        if id(tensor) in found.paths:
            return
        found.paths[id(tensor)] = path
        registered, kept = tensor_hooks(tensor), _attributes_of_tensor(tensor)
        hooks = [(f"hooks[{number}]", hook) for number, hook in enumerate(registered)] if registered else []
        mark = {name: hook for name, hook in hooks if is_user_code(hook)} if hooks else {}
        found.nodes[path] = Node(tensor, "tensor", mark, kept, from_user=False, region="own", covered=True)
        if tensor.layout is torch.strided and tensor.numel():
            found.storage_paths.setdefault(storage_id(tensor), path)
        if hooks or kept:
            self._queue.extend(
                _Found(f"{path}.{name}", one) for name, one in (*hooks, *kept.items()) if not is_constant(one)
            )

    def _inner_optimizer_state(self, optimizer: Optimizer) -> Children:
        """Return the state and the groups of an optimizer by name. The result is empty if these are saved separately, for example
        because the optimizer is a root of the walk."""
        held = vars(optimizer)
        if id(held.get("state")) in self.excluded_ids:
            self.result.separate_optimizers.add(id(optimizer))
        if id(optimizer) in self.result.separate_optimizers:
            return {}
        return {name: held[name] for name in ("state", "param_groups") if name in held}

    def _address_key(self, key: int) -> Any:
        """Return ``key``; if it is the ``id`` of a visited object, a key with that object's path instead."""
        path = self.result.paths.get(key)
        return key if path is None else AddressKey(path)

    def _is_ignored(self, path: str) -> bool:
        """True if ``path`` is ignored; it is then recorded in ``ignored_paths``."""
        if path not in self._ignored:
            return False
        self.result.ignored_paths.add(path)
        return True


def path_step(kind: Kind, key: Any) -> str:
    """Return the step of a path from an object to what it holds under ``key``, such as ``.name`` or ``[0]``."""
    if kind == "module":
        return str(key)
    return f".{key}" if kind in ("object", "bound", "function", "class", "tensor", "generator") else f"[{key!r}]"


class ObjectKey:
    """Stands for a dictionary's key that is not a constant. ``number``: the key's place in the dictionary. In the mark of a set,
    it stands for an item that is not a constant."""

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
    """True for an object of the classes ``_CONSTANTS`` (number, string, None, enum member ...), and for a plain tuple of such.
    False for one with attributes of its own, except an enum member."""
    its_class = type(item)
    if its_class in _PLAIN:
        return True
    if its_class in _NOT_CONSTANTS:
        return False
    if its_class is tuple:
        try:
            return all(map(is_constant, item))
        except RecursionError:  # nested tuples: they are visited one by one
            return False
    return isinstance(item, _CONSTANTS) and (isinstance(item, Enum) or not getattr(item, "__dict__", None))


def class_path(item: Any) -> str:
    """Return the path of a class: ``module:Class``."""
    return f"{item.__module__}:{item.__qualname__}"


def _kind(item: Any, region: Region) -> Kind:
    """Return the kind of ``item`` (see ``Kind``). Some classes of frameworks are entered as objects only in the region
    ``registered``."""
    its_class: type = type(item)
    known = _PYTHON_TYPES.get(its_class)
    if known is not None:
        return known
    if _is_ordinary(its_class):
        if issubclass(its_class, nn.Module):
            return "object"
    elif (kind := _special_kind(item)) is not None:
        return kind
    if hasattr(type(item), "__next__") and not hasattr(item, "__dict__"):
        return "other" if hasattr(item, "fileno") else "sealed"
    package = its_class.__module__
    if isinstance(item, _TORCH_TYPES) or package.startswith(_INCLUDED_MODULES):
        return "object"
    if region == "registered" and package.startswith(_INCLUDED_IF_REGISTERED):
        return "object"
    return "other" if _is_excluded(package) or not (hasattr(item, "__dict__") or slots_of(its_class)) else "object"


@lru_cache(maxsize=4096)
def _is_ordinary(kind: Any) -> bool:
    """True if ``_special_kind`` returns None for all objects of the class ``kind``."""
    if kind.__getattribute__ is not object.__getattribute__ or any("__class__" in vars(c) for c in kind.__mro__[:-1]):
        return False  # the attribute ``__class__`` of a proxy may be another class than its type
    return not issubclass(kind, _SPECIAL_TYPES)


def _special_kind(item: Any) -> Kind | None:
    """Return the kind of an object of one of ``_SPECIAL_TYPES``; None for other objects."""
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
        return "function" if is_user_module(str(item.__module__)) else "other"
    if isinstance(item, type):
        return "class" if is_user_class(item) and not issubclass(item, Enum) else "other"
    if isinstance(item, ModuleType):
        return "module"
    if isinstance(item, (np.random.SeedSequence, torch.UntypedStorage)) or (
        isinstance(item, io.IOBase) and _is_input_file(item)
    ):
        return "sealed"
    if isinstance(item, GeneratorType):
        return "other" if _is_excluded(_owner_of(item)) else "sealed"
    return None


def _is_input_file(file: io.IOBase) -> bool:
    """True if a file is open and readable, and is either not writable or in memory."""
    with suppress(ValueError):  # closed
        return file.readable() and (isinstance(file, (io.BytesIO, io.StringIO)) or not file.writable())
    return False


def _is_excluded(module: str) -> bool:
    """True if ``module``, a dotted name, is one of ``_EXCLUDED_PACKAGES`` or below one, and not of ``_INCLUDED_MODULES``."""
    return module.partition(".")[0] in _EXCLUDED_PACKAGES and not module.startswith(_INCLUDED_MODULES)


def _owner_of(generator: GeneratorType[Any, Any, Any]) -> str:
    """Return the name of the module to which a Python generator belongs. If a variable of the generator has a class of
    ``_POSITION_MODULES``, that is the class's module. Else it is the module whose code the generator runs. Empty if the generator
    has ended."""
    frame = generator.gi_frame
    if frame is None:
        return ""
    held = (str(type(value).__module__) for value in frame.f_locals.values())
    return next(
        (module for module in held if module.startswith(_POSITION_MODULES)), str(frame.f_globals.get("__name__"))
    )


def _own_tensors(
    module: nn.Module, table: str, method: Literal["named_parameters", "named_buffers"]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the parameters or buffers of ``module``, without those of its parts, by name. ``table``: the attribute with them;
    ``method``: the method that returns them, which is called only if the module, or its class, has another than torch's."""
    held, kind = vars(module), cast(type, type(module))
    tensors: Any = held.get(table)  # a traced module has no such attribute
    plain = isinstance(tensors, dict)
    for name in (method, "_named_members"):
        plain = plain and name not in held and getattr(kind, name) is getattr(nn.Module, name)
    if not plain:
        return getattr(module, method)(recurse=False)  # type: ignore[no-any-return]
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None] if tensors else ()


def _hooks(item: Any) -> list[tuple[str, Any]]:
    """Return (name, function) for each hook of a module or an optimizer, such as ``_forward_hooks[0]``; nothing for other
    objects."""
    names: Iterable[str] = ()
    if isinstance(item, nn.Module):
        names = _MODULE_HOOK_ATTRIBUTES
        if not any(map(vars(item).get, names)):  # all tables are empty, as in most modules
            return []
    elif isinstance(item, Optimizer):
        names = _optimizer_attributes()
    else:
        return []
    found: list[tuple[str, Any]] = []
    tables = vars(item)
    for name in names:
        held = tables.get(name)
        if isinstance(held, OrderedDict) and held:
            found += ((f"{name}[{n}]", hook) for n, hook in enumerate(held.values()) if callable(hook))
    return found


def _registered_code(item: Any, hooks: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the user's functions among the ``hooks`` of a module or optimizer, by table, and a module's parts under ``parts``;
    empty for others."""
    if not isinstance(item, (nn.Module, Optimizer)):
        return {}
    found: dict[str, Any] = {"parts": dict(item.named_children())} if isinstance(item, nn.Module) else {}
    for name, hook in hooks:
        if is_user_code(hook):
            found.setdefault(name.partition("[")[0], []).append(hook)
    return found


def is_user_code(item: Any) -> bool:
    """True if ``item`` is a function, method or class of the user's."""
    return isinstance(item, (FunctionType, MethodType, type)) and is_user_module(str(item.__module__))


@lru_cache(maxsize=4096)
def _user_bases(kind: type) -> tuple[type, ...]:
    """Return the user's classes among ``kind`` and its bases, without enumerations and ``_USER_LIKE_TYPES``."""
    return tuple(
        base
        for base in kind.__mro__
        if is_user_class(base) and base not in _USER_LIKE_TYPES and not issubclass(base, Enum)
    )


def attributes(item: Any) -> dict[str, Any]:
    """Return an object's attributes by name, slots included. For a module or an optimizer, most attributes that torch itself sets
    are left out, such as tables of hooks."""
    held = {name: getattr(item, name) for name in slots_of(cast(type, type(item))) if hasattr(item, name)}
    held |= getattr(item, "__dict__", {})
    if isinstance(item, nn.Module):
        return {
            name: value
            for name, value in held.items()
            if name not in _MODULE_ATTRIBUTES or name in _MODULE_STATE_ATTRIBUTES
        }
    if isinstance(item, Optimizer):
        return {name: value for name, value in held.items() if name not in _optimizer_attributes()}
    return held


@lru_cache(maxsize=4096)
def _stateless_names(kind: type) -> frozenset[str]:
    """Return the names of a covered module's attributes that are not state: those of every module, and the names with a leading
    underscore that the code of Lightning's classes among the bases of ``kind`` uses."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")]
    methods = [getattr(method, "fget", method) for base in bases for method in vars(base).values()]
    names = (name for method in methods for name in getattr(getattr(method, "__code__", None), "co_names", ()))
    return _MODULE_ATTRIBUTES | {name for name in names if name.startswith("_")}


@lru_cache(maxsize=1)
def _optimizer_attributes() -> frozenset[str]:
    """Return the names of the attributes that every optimizer has, and of those that schedulers add to one."""
    # Not at import: the first optimizer of a process makes torch read the variables of its compiler.
    return frozenset({*vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])), "step", "_opt_called", "_step_count"})


def _is_large(item: Any, kind: Kind) -> bool:
    """True for a list, tuple or dictionary of which only the length and a sample are compared."""
    return kind in ("list", "tuple", "dict") and len(item) > _LARGE_ITEMS


def _children(item: Any, kind: Kind, *, covered: bool) -> Children:
    """Return what ``item`` holds for the walk, by index, key or name. ``covered``: a module whose parts and tensors are saved
    separately."""
    if _is_large(item, kind):
        return {}
    if kind in ("list", "tuple"):
        return dict(enumerate([*item]))
    if kind == "dict":
        held = enumerate(item.items())
        return {
            key if type(key) in _PLAIN or is_constant(key) else ObjectKey(number, key): value
            for number, (key, value) in held
        }
    if kind == "set":
        objects = [one for one in item if not is_constant(one)]
        return dict(enumerate(objects)) if len(objects) == 1 else {}
    if kind == "tensor":
        return _tensor_state(item)
    if covered:
        its_class: type = type(item)
        theirs = _stateless_names(its_class)
        return {name: value for name, value in vars(item).items() if name not in theirs}
    if kind == "object":
        return attributes(item)
    if kind == "function":
        return _function_state(item)
    if kind in ("class", "module"):
        plain = {name: value for name, value in vars(item).items() if not name.startswith("__")}
        return {n: v.__func__ if isinstance(v, (classmethod, staticmethod)) else v for n, v in plain.items()}
    if kind == "generator":
        return {name: value for name, value in getattr(item, "__dict__", {}).items() if name != "gauss_next"}
    return _held_objects(item) if kind == "bound" else {}


def _unordered(item: Collection[Any]) -> list[Any]:
    """Return a set's objects that are not constants. The result is empty for a set with only one such object, and for a large
    set."""
    objects = [one for one in item if not is_constant(one)] if len(item) <= _LARGE_ITEMS else []
    return objects if len(objects) > 1 else []


def _held_objects(item: Any) -> Children:
    """Return the objects that an object of one of ``_HOLDERS`` holds, by name, key or number."""
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
    """Return the attributes that were set on a tensor, by name, without those of torch's compiler."""
    held = vars(tensor)
    return {name: value for name, value in held.items() if not name.startswith("_dynamo_")} if held else {}


def _tensor_state(tensor: torch.Tensor) -> Children:
    """Return the attributes that were set on a tensor, by name, with the gradient of a trained leaf as ``grad``."""
    kept = _attributes_of_tensor(tensor)
    if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
        kept["grad"] = tensor.grad
    return kept


def _function_state(function: FunctionType) -> Children:
    """Return, by name, what a function keeps from call to call: defaults of its parameters, closure variables, and its
    attributes."""
    code = function.__code__
    defaults, names = function.__defaults__ or (), code.co_varnames[: code.co_argcount]
    kept = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            kept[name] = cell.cell_contents
    return kept | vars(function)


def _mark(item: Any, kind: Kind, hooks: Iterable[tuple[str, Any]]) -> Any:
    """Return the value by which two walks compare an object besides its children; None if only these count. ``hooks``: as
    ``_hooks`` returns them."""
    if kind == "tensor":
        return _mark_of_tensor(item)
    if kind == "array":
        return item.shape, item.dtype.str, _array_digest(item)
    if kind == "generator":
        tensors, data = encode(GeneratorState(item).state_dict(), root="generator")
        return data, {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    if kind == "set":
        return frozenset(one if is_constant(one) else ObjectKey(0, one) for one in item)
    if kind == "bytes":
        return bytes(item)
    if _is_large(item, kind):
        return _mark_of_large(item)
    if kind == "object":
        return type(item), _registered_code(item, hooks)
    return _mark_of_sealed(item) if kind == "sealed" else None


def _mark_of_large(item: Any) -> Any:
    """Return the length of a large container, and the contents of a sample of its items (of a dictionary: of its keys and values)
    down to the second level."""
    held = item.items() if isinstance(item, dict) else item
    sample: Iterable[Any] = chain(islice(held, 0, None, -(-len(item) // _SAMPLE)), islice(reversed(held), 1))
    if isinstance(item, dict):  # not the pairs: ``items()`` makes new ones each time
        sample = chain.from_iterable(sample)
    return len(item), [_contents(one, _SAMPLE) for one in sample]


def _contents(item: Any, most: int) -> Any:
    """Return a comparable form of ``item``: a constant as text, any other object by its ``id``. The form of a tensor includes
    torch's count of in-place changes, that of a small array its bytes. The form of a container, or of an object of the user's,
    includes the forms of up to ``most`` items or attributes. If ``most`` is ``_SAMPLE``, these include up to ``_INNER`` items or
    attributes of their own."""
    if is_constant(item):
        return repr(item)
    if isinstance(item, torch.Tensor):
        return id(item), version_of(item)
    if isinstance(item, np.ndarray) and item.nbytes <= _SAMPLE and not item.dtype.hasobject:
        return id(item), item.tobytes()
    if most == 0:
        return id(item)
    held: Iterable[Any] = ()
    if isinstance(item, dict):
        held = chain.from_iterable(islice(item.items(), most))
    elif isinstance(item, (list, tuple, set, frozenset, deque)):
        held = islice(item, most)
    elif is_user_class(type(item)):
        held = islice(getattr(item, "__dict__", {}).values(), most)
    return id(item), [_contents(one, _INNER if most == _SAMPLE else 0) for one in held]


def _mark_of_sealed(item: Any) -> Any:
    """Return the value by which two walks compare an object whose state cannot be stored, such as a digest."""
    if isinstance(item, torch.Tensor):
        return version_of(item)
    if isinstance(item, np.ndarray):
        if item.dtype.hasobject and item.dtype.names:  # its rows are new objects each time
            return [_mark_of_sealed(item[name]) for name in item.dtype.names]
        return [*map(id, item.reshape(-1)[:_MAX_ARRAY_ITEMS])] if item.dtype.hasobject else _array_digest(item)
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
    """Return the value by which two walks compare a file: its read position, if available, and contents held in memory."""
    held = file.getvalue() if isinstance(file, (io.BytesIO, io.StringIO)) else None
    places: tuple[Any, ...] = (file, getattr(file, "buffer", None))
    for one in places:  # tell() raises for a text file that is being iterated over
        with suppress(OSError, AttributeError):
            return one.tell(), held
    return held


def _position(iterator: Any) -> Any:
    """Return the position of one of Python's iterators without moving it; a new object if it is not available."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            parts = iterator.__reduce__()
    except Exception:  # whatever the iterator's own code raises
        return object()
    if len(parts) == 2 and parts[0] is iter and type(parts[1][0]) is list:
        return len(parts[1][0])  # of a dictionary or set, or at its end: a new list of the items that remain
    return _position_of(parts)


def _position_of(part: Any) -> Any:
    """Return a comparable form of a part of an iterator's ``__reduce__``: constants by value, iterators by position, others by
    ``id``."""
    if type(part) is tuple:
        return [*map(_position_of, part)]
    if is_constant(part):
        return part
    return _position(part) if hasattr(type(part), "__next__") else id(part)


def _mark_of_tensor(tensor: torch.Tensor) -> Any:
    """Return a comparable form of a tensor, with a digest of its elements or torch's count of in-place changes."""
    if type(tensor) not in PLAIN_TENSORS or tensor.is_quantized:
        return version_of(tensor)
    form = tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
    if tensor.is_cpu and tensor.nbytes <= SMALL:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return *form, _digest(flat.view(torch.uint8).numpy()) if flat.numel() else ""
    return *form, tensor.data_ptr(), version_of(tensor)


def _array_digest(array: np.ndarray[Any, Any]) -> str:
    """Return a digest of an array's elements. For a very large array, only blocks spread over it are digested. Empty for an array
    without elements."""
    if not array.size:
        return ""
    if isinstance(array, np.ma.MaskedArray):
        return _array_digest(array.data) + _array_digest(np.ma.getmaskarray(array))
    flat = np.ascontiguousarray(array.reshape(-1, order="A")).view(np.uint8)  # no copy for a transposed array
    if flat.nbytes <= _FULLY_COMPARED_BYTES:
        return _digest(flat)
    blocks = flat[: flat.nbytes // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    return _digest(np.ascontiguousarray(blocks[:: -(-flat.nbytes // _FULLY_COMPARED_BYTES)]).reshape(-1))


def _digest(flat: np.ndarray[Any, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(flat.data)


@lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class and its bases, as ``getattr`` finds them."""
    names: list[str] = []
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{one.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def forget_classes() -> None:
    """Empty the caches that keep the script's classes, and so all that it holds, alive."""
    for cached in (_is_ordinary, _user_bases, _stateless_names, slots_of):
        cached.cache_clear()


def is_user_class(kind: type) -> bool:
    """True if a class is the user's own, or is treated like one (``_USER_LIKE_TYPES``)."""
    return kind in _USER_LIKE_TYPES or is_user_module(kind.__module__)


@lru_cache(maxsize=4096)
def is_user_module(name: str) -> bool:
    """True for ``__main__``, and for modules from files that are neither Python's nor an installed or excluded package's.
    Cached."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or file is None:
        return name == "__main__"
    return not _is_excluded(name) and not any(Path(file).is_relative_to(folder) for folder in _installed_folders())


@lru_cache(maxsize=1)
def _installed_folders() -> tuple[Path, ...]:
    """Return the directories of Python's own modules and of installed packages."""
    places = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(places | {Path(one) for one in sys.path if Path(one).name in ("site-packages", "dist-packages")})


def is_same(old: Any, new: Any) -> bool:
    """True if both are the same object, equal bound methods, or equal constants of one type. Some constants, such as floats and
    tuples, are compared as text."""
    if old is new:
        return True
    if isinstance(old, MethodType):
        return isinstance(new, MethodType) and old.__func__ is new.__func__ and old.__self__ is new.__self__
    if type(old) is not type(new) or not is_constant(new):
        return False
    return repr(old) == repr(new) if isinstance(new, (float, complex, np.generic, tuple, *VALUES)) else bool(old == new)


def are_same_children(old: Children, new: Children) -> bool:
    """True if both have the same keys in the same order, and ``is_same`` holds for the values under each key."""
    return [*old] == [*new] and all(map(is_same, old.values(), new.values()))
