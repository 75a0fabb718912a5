"""State outside of ``state_dict``, such as attributes of modules, optimizers and data sets. In every attempt the script first
builds the same objects. A checkpoint stores what has changed in these objects since they were built, under the object's path
(``model.layers.0.cache``). The next attempt restores the change in its own object at this path. For a change that cannot be
stored, the checkpoint may have only the path."""

from __future__ import annotations

import logging
import random
import sys
import threading
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import partial
from operator import is_not
from pathlib import Path, PosixPath, PurePosixPath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

import numpy as np
import torch
from torch import nn

from ratchet_contract.errors import StateError
from ratchet_hooks.algorithms.state_version import same_bits
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.encode import encode
from ratchet_hooks.torch_compat import storage_id, tensor_hooks
from ratchet_worker.state import job_modules
from ratchet_worker.state.object_walk import (  # fmt: skip
    PLAIN_TENSORS,
    SMALL,
    UNORDERED,
    Kind,
    Node,
    Roots,
    Walked,
    are_same_children,
    attributes,
    is_constant,
    is_same,
    is_user_class,
    is_user_code,
    path_step,
    slots_of,
    walk,
)
from ratchet_worker.state.rng import GeneratorState

Reference: TypeAlias = tuple[Any, ...]
"""``("value", constant)``; ``("at", path)``: an object that the script builds; ``("new", number)``: one that training made;
``("covered", path)``: a tensor that is saved separately; ``("view", path, offset, shape, stride)``: a part of one; ``("member",
module, class, name)``: of an enumeration; ``("flag", module, class, value)``; ``("code", module, name)``: a function or class;
``("bound", reference, name)``: a method of an object; ``("logger", name)``; ``("address", reference)``: an object's ``id``;
``("torch", name)``, ``("device", name)``, ``("tuple", references)``, ranges, slices, ``("python", type, value)``."""

References: TypeAlias = list[Reference] | dict[str, Any]
"""References of a container's items; ``{"plain": items}`` if all are numbers, strings and the like, ``{"packed": (dtype,
bytes)}`` if all are numbers of one type."""
_TYPES: Final[dict[str, type]] = {
    kind.__name__: kind for kind in (list, tuple, deque, dict, OrderedDict, defaultdict, Counter, set, frozenset)
}

_VALUES: Final[dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "Fraction": (Fraction, str, Fraction),
    "Decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (timedelta, lambda d: [d.days, d.seconds, d.microseconds], lambda parts: timedelta(*parts)),
    "UUID": (UUID, str, UUID),
    "PosixPath": (PosixPath, str, PosixPath),
    "PurePosixPath": (PurePosixPath, str, PurePosixPath),
}
"""Constants of Python's standard library: type, function that writes them, function that reads them."""
_LOCKS: Final[dict[str, Callable[[], Any]]] = {"Lock": threading.Lock, "RLock": threading.RLock}
_PACKED: Final[dict[type, str]] = {float: "<f8", int: "<i8", bool: "|b1"}
_PLAIN: Final = frozenset({float, int, bool, str, bytes, complex, type(None)})
_LEAVES: Final = ("tensor", "array", "generator", "bytes")
_CHANGEABLE: Final = ("list", "dict", "set")
_CODE: Final[tuple[Kind, ...]] = ("other", "bound", "function", "class", "module")
_HEAP_TYPE_FLAG: Final = 1 << 9
"""The flag of classes that are made at run time, as by a ``class`` statement (``Py_TPFLAGS_HEAPTYPE``)."""
_WITHOUT_CONTENTS: Final = (object, SimpleNamespace)
"""Built-in classes whose objects have attributes and nothing else."""
_MAX_NAMED: Final = 100
_TOO_LARGE: Final = (
    "a hook of the script has changed it before the first batch of this attempt, and it is too large to be restored"
)
_CHANGED_ONLY_WHEN_SAVED: Final = (
    "a hook of the script had changed it before the first batch of the attempt that saved this, but not before that of this "
    "attempt, and it cannot be saved"
)
_CHANGED_ONLY_NOW: Final = (
    "a hook of the script has changed it before the first batch of this attempt, but not before that of the attempt that saved "
    "this, and it cannot be saved"
)
NOT_VISITED: Final = "objects beyond the first 200000, most of which are below "
"""In ``Changes.unsaved``: begins the entry that is no path; the path of a container follows."""
RAISES: Final = " (raises when it is inspected)"
"""In ``Changes.unsaved``: follows the path of an object that raises."""
_MAX_DEPTH: Final = 20
"""Largest depth at which nested objects are compared with other objects than the original ones."""


class Changes(NamedTuple):
    """Changes of hidden state. ``stored``: a tree for ``ratchet_hooks.state.encode``, with live tensors. ``unsaved``: changes
    that cannot be stored, mostly as the paths of the changed objects. ``made_before_begin``: paths of such changes that were made
    only before ``HiddenState.begin``."""

    stored: dict[str, Any]
    unsaved: list[str]
    made_before_begin: tuple[str, ...] = ()


class HiddenState:
    """Finds changes of one rank's hidden state, for a save, and restores them. ``ignored``: by path, the reason why it is
    ignored; filled by the caller. ``code``: the directory of the job's modules; None: variables of modules are not examined."""

    def __init__(self, code: Path | None = None) -> None:
        self.ignored: dict[str, str] = {}
        self._code = code
        self._roots = Roots()
        self._built = Walked()
        self._imported = frozenset[str]()  # modules, at `begin`
        self._noted: Walked | None = None  # objects noted before `begin`
        self._copies: dict[int, Any] = {}  # copies of these, by the id of an object that can be changed in place
        self._visited: set[str] = set()
        self._modules: dict[str, ModuleType] = {}  # the job's
        self._all_modules: list[ModuleType] = []  # those among which they were found

    def note_built(self, roots: Roots, *, undo: bool) -> None:
        """Record the objects in ``roots`` as the script has built them, except those recorded before. Storable changes of these
        objects count from now. ``undo``: also copy their contents, except of large tensors and arrays, so that ``restore`` can
        undo changes."""
        before = self._roots
        self._roots = replace(roots, separate_optimizers=before.separate_optimizers)
        if self._noted is None:
            self._noted, nodes = Walked(), self._walk_roots().nodes
        else:
            nodes = self._new_nodes(roots, before)
        for walked in (self._noted, self._built):
            self._add(walked, nodes)
        if undo:
            own = [node for node in nodes.values() if node.region == "own" and not node.covered]
            self._copies |= {id(node.item): _copy(node) for node in own if _can_be_copied(node)}

    def _new_nodes(self, roots: Roots, before: Roots) -> dict[str, Node]:
        """Return, by path, the nodes of objects that can be reached from roots that ``roots`` has and ``before`` has not."""
        noted = [*before.own.values(), *before.registered.values()]
        known = {*map(id, noted)}
        passed = dict(roots.registered) | {f"noted {number}": item for number, item in enumerate(noted)}
        own = {name: item for name, item in roots.own.items() if id(item) not in known}
        beside = [name for name, item in roots.registered.items() if id(item) not in known]
        found = walk(replace(self._roots, own=own, registered=passed, shared={}), self.ignored).nodes
        return {
            path: node
            for path, node in found.items()
            if node.region == "own" or (node.region == "registered" and _is_below_one(path, beside))
        }

    def begin(self, roots: Roots) -> None:
        """Record the objects in ``roots`` at the beginning of training. Changes count from this call. But storable changes of
        objects recorded by ``note_built`` count from that earlier call."""
        before, self._roots = self._roots, roots
        self._imported = frozenset(sys.modules)
        self._built = self._walk_roots()
        self._roots = replace(roots, separate_optimizers=frozenset(self._built.separate_optimizers))
        if self._noted is not None:  # roots that hooks have added, and other objects that state may refer to
            self._add(self._noted, self._new_nodes(roots, before))
            self._add(self._noted, {p: n for p, n in self._built.nodes.items() if n.region == "registered"})

    @staticmethod
    def _add(walked: Walked, nodes: Mapping[str, Node]) -> None:
        """Add each of ``nodes`` to ``walked`` under its path, unless ``walked`` has the node's object already."""
        for path, node in nodes.items():
            if walked.path_of(node.item) is None:
                walked.nodes[path], walked.paths[id(node.item)] = node, path

    def changes(self) -> Changes:
        """Return the changes up to now. Storable changes of objects recorded by ``note_built`` count from that call, all other
        changes from ``begin``."""
        now = self._walk_roots()
        self._add_new_modules(now)
        found = self._compare(self._built, now)
        # Unstorable changes made before `begin` are made by each attempt again: `restore` checks that.
        early = found if self._noted is None else self._compare(self._noted, now)
        made = tuple(sorted({*early.unsaved} - {*found.unsaved}))
        unsaved = found.unsaved[:_MAX_NAMED]
        if not now.complete:
            unsaved.append(f"{NOT_VISITED}{_largest_container(now)}")
        return Changes(early.stored, unsaved, made)

    def _compare(self, before: Walked, now: Walked) -> Changes:
        """Return the changes from the walk ``before`` to the walk ``now``, with all paths in ``unsaved``."""
        return _Recorder(before, now, self._roots.covered_attributes.keys(), self._imported).run()

    @property
    def unmatched(self) -> list[str]:
        """The ignored paths at which no walk has found an object, sorted."""
        return sorted(self.ignored.keys() - self._visited)

    def _walk_roots(self) -> Walked:
        """Return a walk of the roots and of the job's modules as they are now, without the ignored paths."""
        modules = {f"{name}:": module for name, module in self._job_modules().items()}
        found = walk(replace(self._roots, shared={**self._roots.shared, **modules}), self.ignored)
        self._visited |= found.ignored_paths
        return found

    def _job_modules(self) -> dict[str, ModuleType]:
        """Return the job's modules by name. Reads the files' names of all modules, which are thousands, only if
        ``sys.modules`` has changed."""
        every = [*sys.modules.values()]
        if len(every) != len(self._all_modules) or any(map(is_not, every, self._all_modules)):
            self._all_modules, self._modules = every, job_modules.modules_below(self._code)
        return self._modules

    def _add_new_modules(self, now: Walked) -> None:
        """Record the modules in the walk ``now`` that were imported after ``begin``, so that their changes count from now on."""
        new = {path for path, node in now.nodes.items() if node.kind == "module"} - self._built.nodes.keys()
        if new:
            self._add(self._built, {p: n for p, n in now.nodes.items() if f"{p.partition(':')[0]}:" in new})

    def restore(self, stored: Mapping[str, Any], changed_before_begin: Collection[str] = ()) -> dict[str, str]:
        """Put the objects into the saved state ``stored``. Return, by path, why an object still differs.
        ``changed_before_begin``: the saving attempt's ``made_before_begin``. Raises ``StateError`` if ``stored`` does not fit."""
        if self._noted is None:
            _Restorer(self._built, stored).run()
            return {}
        changed = self._compare(self._noted, self._walk_roots())
        left = self._undo(self._noted, changed.stored.get("changed", {}), stored.get("changed", {}))
        _Restorer(self._noted, stored).run()
        left |= dict.fromkeys({*changed_before_begin} - {*changed.unsaved}, _CHANGED_ONLY_WHEN_SAVED)
        return left | dict.fromkeys({*changed.unsaved} - {*changed_before_begin}, _CHANGED_ONLY_NOW)

    def _undo(self, early: Walked, changed: Mapping[str, Any], stored: Collection[str]) -> dict[str, str]:
        """Undo the changes ``changed`` (by path) of objects in ``early``. Return, by path, why an object outside of ``stored``
        keeps its change."""
        left = {}
        for path, change in changed.items():
            node = early.nodes[path]
            if node.covered or node.kind == "object":
                for name in (*change["content"]["set"], *change["content"]["gone"]):
                    _restore_attribute(node, name)
            elif id(node.item) in self._copies:
                _restore_content(node, self._copies[id(node.item)])
            elif path not in stored:
                left[path] = _TOO_LARGE
        self._copies.clear()
        return left


def _largest_container(walked: Walked) -> str:
    """Return the path below which a walk has found the most objects. It is the path of an outermost list, dictionary or set, or
    of an attribute of a root."""
    outer = ((path.partition("[")[0].partition(UNORDERED)[0], path) for path in walked.nodes)
    paths = (at if at != path else ".".join(path.split(".")[:2]) for at, path in outer)
    return Counter(path for path in paths if "." in path or path not in walked.nodes).most_common(1)[0][0]


def _is_below_one(path: str, roots: Iterable[str]) -> bool:
    """True if ``path`` is one of the paths ``roots``, or the path of an object below one of them."""
    return any(path == root or path.startswith((f"{root}.", f"{root}[")) for root in roots)


def _can_be_copied(node: Node) -> bool:
    """True if ``note_built`` can copy the object's contents, as of a list, a generator or a small tensor."""
    large = node.kind in ("tensor", "array") and node.item.nbytes > SMALL
    return node.kind in _CHANGEABLE or (node.kind in _LEAVES and not large)


def _copy(node: Node) -> Any:
    """Return a copy of an object's contents, for ``_restore_content``. Items of containers are not copied."""
    item: Any = node.item
    if node.kind == "tensor":
        return item.detach().clone(), item.requires_grad
    if node.kind == "generator":
        return GeneratorState(item).state_dict()
    if node.kind == "dict":
        return [*item.items()]
    return item[:] if node.kind == "bytes" else item.copy() if node.kind == "array" else [*item]


def _restore_content(node: Node, copied: Any) -> None:
    """Put the contents ``copied``, the result of ``_copy``, back into the same object; for a tensor, also its original
    attributes."""
    item: Any = node.item
    if node.kind == "tensor":
        _fill_tensor(item, copied[0])
        if item.is_leaf:
            item.requires_grad_(copied[1])
        for name in {**node.children, **vars(item)}:
            _restore_attribute(node, name)
    elif node.kind == "generator":
        GeneratorState(item).load_state_dict(copied)
    elif node.kind == "array":
        with _writable(item):
            item[...] = copied
    elif node.kind == "bytes":
        item[:] = copied
    else:
        item.clear()
        if node.kind == "dict":
            for key, value in copied:
                item[key] = value
        else:
            (item.extend if node.kind == "list" else item.update)(copied)


def _restore_attribute(node: Node, name: str) -> None:
    """Give the object its original attribute ``name`` again, or remove the attribute if there was none."""
    if name in node.children:
        _set(node.item, name, node.children[name])
    else:
        _remove(node.item, name)


class _Unstorable(Exception):
    """Raised for a change that cannot be stored; the message is the path of what cannot be."""


class _Recorder:
    """Compares two walks, once, and makes the changes storable. ``with_state``: paths of objects with a ``state_dict``.
    ``imported``: names of the modules that were imported at ``HiddenState.begin``."""

    def __init__(self, built: Walked, now: Walked, with_state: Collection[str], imported: Collection[str]) -> None:
        self._built, self._now, self._with_state, self._imported = built, now, with_state, imported
        self._numbers: dict[int, int] = {}  # places in `_new`, by the id of the object
        self._new: list[Any] = []
        self._unfinished: dict[
            int, bool
        ] = {}  # by the place of an object whose content is not complete: is it referred to?
        self._unstorable: dict[int, str] = {}  # by the id of an object: the path, below it, of what cannot be stored
        self._unsaved: set[str] = set()
        self._arrays: Counter[int] | None = None  # number of arrays per memory address that they use

    def run(self) -> Changes:
        """Return the changes of the objects in both walks. ``unsaved`` also names objects that raise when they are inspected."""
        changed: dict[str, Any] = {}
        for node in self._now.nodes.values():
            path = self._built.path_of(node.item)
            if path is None or node.region == "registered":
                continue
            before = self._built.nodes[path]
            if node.mark == before.mark and are_same_children(before.children, node.children):
                continue
            if node.region != "own" or UNORDERED in path:
                self._unsaved |= {at.partition(UNORDERED)[0] for at in self._changed_paths(path, before, node)}
                continue
            try:
                if node.covered:
                    self._unsaved |= {
                        f"{path}.{n}" for n in {**before.mark, **node.mark} if before.mark.get(n) != node.mark.get(n)
                    }
                    content = self._attributes(path, before, node)
                elif node.kind == "tensor":
                    content = self._content(path, node) | (self._attributes(path, before, node) or {})
                elif node.kind == "object":
                    self._unsaved.update(_changed_code(path, before, node))
                    content = self._attributes(path, before, node)
                elif node.kind in _LEAVES or node.kind in _CHANGEABLE:
                    if node.kind == "generator" and not are_same_children(before.children, node.children):
                        raise _Unstorable(path)
                    content = self._content(path, node)
                else:
                    raise _Unstorable(path)
            except _Unstorable as error:
                self._unsaved.add(str(error))
            except Exception:  # raised by the object's own code, or because the structure is too deep
                self._unsaved.add(path)
            else:
                if content is not None:
                    changed[path] = {"kind": node.kind, "content": content}
        self._unsaved |= {f"{path.partition(UNORDERED)[0]}{RAISES}" for path in self._now.failed}
        return Changes({"changed": changed, "new": self._new} if changed else {}, sorted(self._unsaved))

    def _changed_paths(self, path: str, before: Node, now: Node) -> Iterator[str]:
        """Yield the paths of the changes in an object whose changes cannot be stored: those of its variables, or ``path`` itself.
        Omits changes that do not count, such as those of a list that training only writes into."""
        if now.kind in _LEAVES:
            yield path
            return
        if not now.from_user and now.region == "shared":
            return
        if now.kind not in ("object", "function", "class", "module"):
            if (now.mark != before.mark or not self._are_children_equal(before, now)) and not job_modules.is_log(path):
                yield path
            return
        for name in {**before.children, **now.children}:
            old, new = before.children.get(name), now.children.get(name)
            has_changed = (self._has_state(old) or self._has_state(new)) and not self._is_equal(old, new)
            if (has_changed or self._is_other_code(old, new)) and self._is_set_by_code(now, name):
                yield f"{path}{path_step(now.kind, name)}"

    def _is_set_by_code(self, node: Node, name: str) -> bool:
        """False for a closure variable that neither the function nor one inside it assigns, and for a variable of the main script
        that no ``global`` statement names; else True."""
        if node.kind == "function":
            return job_modules.assigns(node.item.__code__, name) or name not in node.item.__code__.co_freevars
        return node.kind != "module" or job_modules.is_set_by_functions(node.item, name)

    def _is_equal(self, old: Any, new: Any, depth: int = 0) -> bool:
        """True if both are the same object, or if ``new`` as it is now equals ``old`` as it was in the earlier walk."""
        if is_same(old, new):
            return True
        a, b = self._built.path_of(old), self._now.path_of(new)
        if a is None or b is None or type(old) is not type(new) or depth == _MAX_DEPTH:
            return False
        before, now = self._built.nodes[a], self._now.nodes[b]
        return before.mark == now.mark and self._are_children_equal(before, now, depth + 1)

    def _are_children_equal(self, before: Node, now: Node, depth: int = 0) -> bool:
        """True if both nodes hold equal objects (``_is_equal``) under the same keys in the same order."""
        old, new = before.children, now.children
        return [*old] == [*new] and all(self._is_equal(old[key], value, depth) for key, value in new.items())

    def _is_other_code(self, old: Any, new: Any) -> bool:
        """True if ``old``, a function, class, method or ``partial``, was replaced by one with other code, object or arguments."""
        if is_same(old, new) or not (_is_code(old) and _is_code(new)):
            return False
        if is_user_code(old) and is_user_code(new):
            other = getattr(old, "__code__", old) is not getattr(new, "__code__", new)
        else:
            other = _name_of(old) != _name_of(new)
        a, b = _bound_to(old), _bound_to(new)
        return other or a.keys() != b.keys() or any(self._is_other_argument(a[key], b[key]) for key in a)

    def _is_other_argument(self, old: Any, new: Any) -> bool:
        """True if ``new`` is not equal to ``old``, or is another object that the script has built. Functions and the like are
        compared by ``_is_other_code``. Two iterators of a ``DataLoader`` count as equal."""
        # A script makes an iterator of a DataLoader for each epoch.
        if is_same(old, new) or (_is_loader_iterator(old) and _is_loader_iterator(new)):
            return False
        if _is_code(old) and _is_code(new):
            return self._is_other_code(old, new)
        return self._built.path_of(new) is not None or not self._is_equal(old, new)

    def _attributes(self, path: str, before: Node, now: Node) -> Any:
        """Return an object's changed attributes: ``set`` (references by name) and ``gone`` (names); None without any. Adds to
        ``_unsaved`` what cannot be stored."""
        names = [
            n for n, value in now.children.items() if n not in before.children or not is_same(before.children[n], value)
        ]
        if self._now.library_hooks > self._built.library_hooks:
            # A library that registers hooks in a first forward notes that on the module; a new process does not have them.
            noted = {n for n in names if n.startswith("_") and n not in before.children and now.children[n] is True}
            names = [name for name in names if name not in noted]
        gone = [name for name in before.children if name not in now.children]
        found: dict[str, Reference] = {}
        made = False
        for name in names:
            at, value, old = f"{path}.{name}", now.children[name], before.children.get(name)
            if (
                self._is_other_code(old, value)
                or (_is_code(old) and value is None)
                or (old is None and _is_code(value))
            ):
                code = _code_reference(value)
                if code is not None and (value is None or code[1] in self._imported):
                    found[name] = code
                    continue
                if old is not None or code is not None:
                    self._unsaved.add(at)
            if not self._has_state(value) and not self._has_state(old):
                continue
            try:
                found[name] = self._reference(at, value)
            except _Unstorable as error:
                if old is None and path in self._with_state:
                    made = True  # created when it is needed, and its position is in the state
                    continue
                self._unsaved.add(str(error))
        if made:  # a constant might say that the iterator exists, and for what it was made
            found = {name: reference for name, reference in found.items() if not is_constant(now.children[name])}
        return {"set": found, "gone": gone} if found or gone else None

    def _has_state(self, value: Any) -> bool:
        """True if ``value`` is state; False, for example, for None, code, and objects that the walk does not enter."""
        if value is None or is_constant(value):
            return value is not None
        path = self._now.path_of(value) or self._built.path_of(value)
        walked = self._now if self._now.path_of(value) else self._built
        if path is None or (node := walked.nodes[path]).kind in _CODE:
            return False
        return node.region != "shared" or node.from_user or node.kind in _LEAVES

    def _reference(self, path: str, item: Any) -> Reference:
        """Return a reference to ``item``, found at ``path``. May add the content of a new object to ``_new``. Raises
        ``_Unstorable``."""
        if is_constant(item):
            return _constant_reference(path, item, self._imported)
        at = self._now.path_of(item)
        if at is None:
            return self._unvisited_reference(path, item)
        node, built = self._now.nodes[at], self._built.path_of(item)
        if node.covered:
            return "covered", at
        if UNORDERED in at or (built is not None and UNORDERED in built):
            raise _Unstorable(path)
        if built is not None:
            return "at", built
        if node.kind in ("sealed", *_CODE):
            return self._code_in_new(path, node)
        if node.kind == "tensor" and (view := self._view(path, node)) is not None:
            return view
        if node.kind in ("tensor", "array") and self._shares_memory_of_array(item):
            raise _Unstorable(path)
        return self._new_reference(path, node)

    def _code_in_new(self, path: str, node: Node) -> Reference:
        """Return a reference to a lock, function, class, logger or bound method. Raises ``_Unstorable`` for any other object.
        Also raises it for an object that the next attempt cannot find by name, such as a lambda."""
        item: Any = node.item
        if _lock_kind(item) is not None:
            return self._new_reference(path, node)
        if isinstance(item, logging.Logger) and logging.Logger.manager.loggerDict.get(item.name, logging.root) is item:
            return "logger", item.name
        if isinstance(item, MethodType) and (name := _method_name(item)) is not None:
            return "bound", self._reference(f"{path}.__self__", item.__self__), name
        code = _code_reference(item) if _is_code(item) else None
        if code is None or code[1] not in self._imported:
            raise _Unstorable(path)
        return code

    def _new_reference(self, path: str, node: Node) -> Reference:
        """Return a reference to an object that training made. The first call for an object adds its content to ``_new``. Raises
        ``_Unstorable``, or what the object's code raises, if the content cannot be stored."""
        key = id(node.item)
        if key in self._unstorable:
            raise _Unstorable(path + self._unstorable[key])
        number = self._numbers.setdefault(key, len(self._new))
        if number in self._unfinished:
            self._unfinished[number] = True
        elif number == len(self._new):
            self._new.append(None)
            self._unfinished[number] = False
            try:
                self._new[number] = {"kind": node.kind, "content": self._content(path, node, new=True)}
            except Exception as error:
                # What was added meanwhile may refer to this object.
                if self._unfinished[number]:
                    del self._new[number + 1 :]
                    self._numbers = {key: place for key, place in self._numbers.items() if place <= number}
                del self._numbers[key]
                self._unstorable[key] = str(error).removeprefix(path) if isinstance(error, _Unstorable) else ""
                raise
            finally:
                del self._unfinished[number]
        return "new", number

    def _unvisited_reference(self, path: str, item: Any) -> Reference:
        """Return a reference to a dict or set of constants that the walk does not visit. Raises ``_Unstorable`` for others."""
        kind: Kind = "dict" if isinstance(item, dict) else "set"
        if _TYPES.get(type(item).__name__) is not type(item) or not isinstance(item, (dict, set)):
            raise _Unstorable(path)
        if not all(is_constant(one) for one in (item.values() if isinstance(item, dict) else item)):
            raise _Unstorable(path)
        return self._new_reference(path, Node(item, kind, None, {}, from_user=True, region="own"))

    def _shares_memory_of_array(self, item: Any) -> bool:
        """True if ``item``, a tensor or array that training made, uses the memory of another array in the walk."""
        if self._arrays is None:
            arrays = [node.item for node in self._now.nodes.values() if node.kind == "array"]
            self._arrays = Counter(map(_memory_of, arrays))
        return self._arrays[_memory_of(item)] > (1 if isinstance(item, np.ndarray) else 0)

    def _view(self, path: str, node: Node) -> Reference | None:
        """Return a reference to a tensor as a view of a parameter or buffer that is saved separately. Return None for a tensor
        that is no such view. Raises ``_Unstorable`` if offset, shape and strides do not fully describe the view."""
        tensor: torch.Tensor = node.item
        owner = self._now.storage_paths.get(storage_id(tensor)) if tensor.numel() else None
        if owner is None:
            return None
        other = self._now.nodes[owner].item.dtype is not tensor.dtype or tensor.is_conj() or tensor.is_neg()
        if other or type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad) or node.children:
            raise _Unstorable(path)
        return "view", owner, tensor.storage_offset(), list(tensor.shape), list(tensor.stride())

    def _content(self, path: str, node: Node, *, new: bool = False) -> Any:
        """Return an object's whole content, with references in place of the objects that it holds. ``new``: include what the next
        attempt needs to create the object. Raises ``_Unstorable``."""
        item: Any = node.item
        kind = node.kind
        if kind == "tensor":
            if type(item) not in PLAIN_TENSORS or (new and any(map(is_user_code, tensor_hooks(item)))):
                raise _Unstorable(path)
            trained = item.requires_grad and item.is_leaf
            value = _storable(path, item.detach())
            kept = {name: self._reference(f"{path}.{name}", one) for name, one in node.children.items()} if new else {}
            return {"value": value, "parameter": isinstance(item, nn.Parameter), "trained": trained, "set": kept}
        if kind == "array":
            with nullcontext() if new else _writable(item):  # can it be restored?
                return _storable(path, item)
        if kind == "bytes":
            if new and type(item) not in (bytearray, array):
                raise _Unstorable(path)
            return {"type": "" if isinstance(item, bytearray) else item.typecode, "value": bytes(item)}
        if kind == "generator":
            if new and node.children:  # attributes
                raise _Unstorable(path)
            return {"made": _generator_source(path, item) if new else None, "state": GeneratorState(item).state_dict()}
        if kind == "object":
            return self._object(path, node)
        if kind == "other":
            return {"type": _lock_kind(item)}
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            if getattr(item, "__dict__", None):
                raise _Unstorable(path)
            items = [self._reference(f"{path}[{number}]", one) for number, one in enumerate(item)]
            return {"class": _qualified_name(path, type(item), self._imported), "items": items}
        name = type(item).__name__
        if _TYPES.get(name) is not node.item.__class__:
            raise _Unstorable(path)
        content: dict[str, Any] = {"type": name}
        if kind == "set":
            if type(item) is set and [*{*item}] != [*item]:
                raise _Unstorable(path)  # its order also depends on removed items
            # In an order that does not depend on how the set grew: two checkpoints of equal sets are equal.
            items = sorted(item, key=repr) if all(map(is_constant, item)) else [*item]
            content["items"] = _plain_references(path, items) or [self._reference(path, one) for one in items]
        elif kind == "dict":
            keys = [*item]
            plain = (
                _plain_references(path, keys) if {*map(type, keys)} == {str} else None
            )  # a number may be an object's id
            content["keys"] = plain or [self._key(path, key) for key in keys]
            content["items"] = _plain_references(path, [*item.values()]) or [
                self._reference(f"{path}{path_step(kind, key)}", one) for key, one in item.items()
            ]
            if type(item) is defaultdict:
                content["factory"] = _qualified_name(path, item.default_factory, self._imported)
            if new and (held := getattr(item, "__dict__", None)):  # as the versions of a module's state_dict
                content["set"] = {name: ("value", _storable(f"{path}.{name}", one)) for name, one in held.items()}
        else:
            content["items"] = _plain_references(path, [*item]) or [
                self._reference(f"{path}[{number}]", one) for number, one in enumerate(item)
            ]
            if type(item) is deque:
                content["longest"] = item.maxlen
        return content

    def _key(self, path: str, key: Any) -> Reference:
        """Return a reference to a dictionary's key. If the key is the ``id`` of an object that the walk has visited, the
        reference is to the ``id`` of this object. Raises ``_Unstorable``."""
        found = self._now.paths.get(key) if type(key) is int else None
        return (
            self._reference(path, key)
            if found is None
            else ("address", self._reference(path, self._now.nodes[found].item))
        )

    def _object(self, path: str, node: Node) -> Any:
        """Return an object's class and attributes, from which the next attempt creates it. Raises ``_Unstorable`` if that is
        impossible."""
        item: Any = node.item
        users: type = type(item)
        if not (is_user_class(users) or isinstance(item, nn.Module)) or _built_in_base(users) not in _WITHOUT_CONTENTS:
            raise _Unstorable(path)
        try:
            _new_instance(users)
        except TypeError as error:
            raise _Unstorable(path) from error
        held = attributes(item)
        ignored = held.keys() - node.children.keys()
        held = getattr(item, "__dict__", {}) | held  # also torch's own attributes of a module or an optimizer
        # All or none: without one of them the object may fail later, while a script that finds no object makes a whole one.
        found = {
            name: self._reference(f"{path}.{name}", value)
            for name, value in held.items()
            if name not in ignored or is_constant(value)
        }
        return {"class": _qualified_name(path, users, self._imported), "set": found}


def _changed_code(path: str, before: Node, now: Node) -> Iterator[str]:
    """Yield a path for each part of an object's code that has changed: its class (``path.__class__``), a module's submodules
    (``path.parts``), or the user's hooks of one table (such as ``path._forward_hooks``)."""
    (old_class, old), (new_class, new) = before.mark, now.mark
    if old_class is not new_class:
        yield f"{path}.__class__"
    yield from (f"{path}.{name}" for name in {**old, **new} if old.get(name) != new.get(name))


def _is_loader_iterator(item: Any) -> bool:
    """True for what ``iter`` of a torch ``DataLoader`` returns, whose classes have no public names."""
    kind = type(item)
    return kind.__module__ == "torch.utils.data.dataloader" and kind.__name__.endswith("DataLoaderIter")


def _bound_to(item: Any) -> dict[Any, Any]:
    """Return a ``partial``'s function and arguments, or the object of a bound method or built-in function, by name or number.
    Empty for others."""
    if isinstance(item, partial):
        return {**dict(enumerate((item.func, *item.args))), **item.keywords}
    return {"__self__": item.__self__} if isinstance(item, (MethodType, BuiltinFunctionType)) else {}


def _code_reference(item: Any) -> Reference | None:
    """Return a reference by which the next attempt finds the function or class ``item`` by name. Return None if the name does not
    lead to ``item``. If ``item`` is None, return a reference to the constant None."""
    if item is None:
        return "value", None
    name = _name_of(item)
    return ("code", *name) if _find_by_name(*name) is item else None


def _method_name(method: MethodType) -> str | None:
    """Return the name under which the class of the method's object has the method's function. Return None if the class does not
    have it."""
    owner: type = type(method.__self__)
    held = (name for base in owner.__mro__ for name, one in vars(base).items() if one is method.__func__)
    return next((name for name in held if getattr(owner, name, None) is method.__func__), None)


def _lock_kind(item: Any) -> str | None:
    """Return the name of the function in ``threading`` that makes locks like ``item``. Return None if ``item`` is no such
    lock."""
    return next((name for name, make in _LOCKS.items() if type(item) is type(make())), None)


def _is_code(item: Any) -> bool:
    """True for any function, class, bound method or ``partial``."""
    return isinstance(item, (FunctionType, BuiltinFunctionType, MethodType, type, partial))


def _name_of(item: Any) -> tuple[str, str]:
    """Return module and qualified name of a function, class or method, as far as it has them."""
    return str(getattr(item, "__module__", "")), str(getattr(item, "__qualname__", ""))


def _plain_references(path: str, items: list[Any]) -> References | None:
    """Return the references of a container's ``items`` in a compact form; None if that is not possible, as for objects."""
    kinds = {*map(type, items)}
    if not kinds or not kinds <= _PLAIN:
        return None
    if len(kinds) == 1 and (dtype := _PACKED.get(*kinds)) is not None:
        try:
            return {"packed": (dtype, np.array(items, dtype).tobytes())}
        except OverflowError:  # beyond 64 bits
            return {"plain": items}
    try:
        return {"plain": _storable(path, items)}
    except _Unstorable:
        return None


def _constant_reference(path: str, item: Any, imported: Collection[str]) -> Reference:
    """Return a reference to the constant ``item``. Raises ``_Unstorable`` if it would not be read back unchanged."""
    if type(item).__name__ in _VALUES:
        kind, write, read = _VALUES[type(item).__name__]
        if type(item) is not kind or repr(read(write(item))) != repr(item):
            raise _Unstorable(path)
        return "python", type(item).__name__, write(item)
    if type(item) is tuple and not all(
        type(one) in (int, float, str, bool, bytes, complex, type(None)) for one in item
    ):
        return "tuple", [_constant_reference(path, one, imported) for one in item]
    if isinstance(item, Flag):  # not every version of Python names a combination of members
        return "flag", *_qualified_name(path, type(item), imported), item.value
    if isinstance(item, Enum):
        return "member", *_qualified_name(path, type(item), imported), item.name
    if isinstance(item, (torch.dtype, torch.memory_format)):
        return "torch", str(item).removeprefix("torch.")
    if isinstance(item, torch.device):
        return "device", str(item)
    if isinstance(item, (range, slice)):
        return type(item).__name__, item.start, item.stop, item.step
    if isinstance(item, np.generic) and type(item) is not item.dtype.type:
        raise _Unstorable(path)
    return "value", _storable(path, item)


def _storable(path: str, value: Any) -> Any:
    """Return ``value`` unchanged. Raises ``_Unstorable``, naming ``path``, if ``ratchet_hooks.state.encode`` does not accept
    it."""
    try:
        encode(value, root=path)
    except HookStateError as error:
        raise _Unstorable(path) from error
    return value


def _generator_source(path: str, generator: Any) -> Any:
    """Return what creates a new generator: a numpy generator itself, or the name of a kind. Raises ``_Unstorable`` for others."""
    if type(generator) in (np.random.Generator, np.random.RandomState):
        return _storable(path, generator)
    if type(generator) is random.Random:
        return "random"
    if type(generator) is torch.Generator and generator.device.type == "cpu":
        return "torch"
    raise _Unstorable(path)


def _qualified_name(path: str, item: Any, imported: Collection[str]) -> tuple[str, str]:
    """Return module and qualified name of a class or factory; two empty strings for None. Raises ``_Unstorable`` if the next
    attempt could not find ``item`` by these names."""
    if item is None:
        return "", ""
    name = _name_of(item)
    if name[0] not in imported or _find_by_name(*name) is not item:
        raise _Unstorable(path)
    return name


def _find_by_name(module: str, name: str) -> Any:
    """Return the object ``name`` (``Class.method``) of a module that is imported already; None if there is none. Does not
    import the module."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _new_instance(kind: type) -> Any:
    """Return an object of ``kind`` without attributes, without calling the class's ``__init__``. Raises ``TypeError`` if its
    built-in base needs arguments."""
    return _built_in_base(kind).__new__(kind)


def _built_in_base(kind: type) -> Any:
    """Return the first class among ``kind`` and its bases, in the order of ``__mro__``, that is built in: it was not made at run
    time (``_HEAP_TYPE_FLAG``). This is ``object`` if no other one is built in."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE_FLAG)


def _memory_of(item: Any) -> int:
    """Return the address of a tensor's whole storage, or of the whole array of which ``item`` is a view. An array that uses
    the memory of a tensor or a buffer has the address of its own first element."""
    if isinstance(item, torch.Tensor):
        return item.untyped_storage().data_ptr()
    while isinstance(item.base, np.ndarray):
        item = item.base
    address: int = item.__array_interface__["data"][0]
    return address


def _require_imported(module: str, name: str) -> Any:
    """Return the function or class ``name`` of ``module``. Raises ``StateError`` if no imported module has it."""
    found = _find_by_name(module, name)
    if found is None:
        raise StateError(f"{module}.{name} is not imported this time")
    return found


def _require_class(module: str, name: str) -> Any:
    """Return the class ``name`` of ``module``. Raises ``StateError`` if the module is not imported or has no such class."""
    found = _find_by_name(module, name)
    if not isinstance(found, type):
        raise StateError(f"the class {module}.{name} is not imported this time")
    return found


class _Restorer:
    """Applies the stored changes to the objects of the walk ``built``. ``stored``: ``Changes.stored`` of the checkpoint. Use it
    once."""

    def __init__(self, built: Walked, stored: Mapping[str, Any]) -> None:
        self._built = built
        self._changed: Mapping[str, Any] = stored.get("changed", {})
        self._new: list[Any] = stored.get("new", [])
        self._created: dict[int, Any] = {}

    def run(self) -> None:
        """Apply all stored changes. Raises ``StateError`` if something does not fit, perhaps after some of them."""
        for path, change in self._changed.items():
            node = self._built.nodes.get(path)
            if node is None or node.kind != change["kind"]:
                raise StateError(f"{path}: a {change['kind']} was there, which the script has not built this time")
        for path, change in self._changed.items():
            node = self._built.nodes[path]
            if node.covered:
                self._set_attributes(self._covered_tensor(path), change["content"])
            else:
                self._fill(path, node.item, change["kind"], change["content"])

    def _fill(self, path: str, item: Any, kind: str, content: Any) -> None:
        """Put the stored content into ``item``; of an object, only the stored attributes change. Raises ``StateError`` if it does
        not fit."""
        if kind == "tensor":
            _fill_tensor(item, content["value"])
            if item.is_leaf:
                item.requires_grad_(content["trained"])
            self._set_attributes(item, content)
        elif kind == "bytes":
            item[:] = self._empty(kind, content)
        elif kind == "array":
            if item.shape != content.shape or item.dtype != content.dtype:
                raise StateError(
                    f"{path}: an array of {content.dtype} {content.shape} was there, now it is {item.dtype} {item.shape}"
                )
            with _writable(item):
                item[...] = content
        elif kind == "generator":
            GeneratorState(item).load_state_dict(content["state"])
        elif kind == "object":
            self._set_attributes(item, content)
        elif kind == "dict":
            found = self._pairs(content)
            item.clear()
            for key, value in found:
                item[key] = value
            self._set_attributes(item, content)
        elif not isinstance(item, frozenset):  # it cannot change; older checkpoints may have stored one
            found = self._resolve_all(content["items"])
            item.clear()
            (item.update if kind == "set" else item.extend)(found)

    def _set_attributes(self, item: Any, content: Mapping[str, Any]) -> None:
        """Remove the attributes in ``content["gone"]`` from ``item``, and set those in ``content["set"]`` to the objects that
        they refer to."""
        for name in content.get("gone", ()):
            _remove(item, name)
        for name, reference in content.get("set", {}).items():
            _set(item, name, self._resolve(reference))

    def _pairs(self, content: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """Return the keys and values that a dictionary's stored references stand for. Raises ``StateError`` if this attempt lacks
        one."""
        return [*zip(self._resolve_all(content["keys"]), self._resolve_all(content["items"]), strict=True)]

    def _resolve_all(self, references: References) -> list[Any]:
        """Return the objects that a container's stored references stand for. Raises ``StateError`` if this attempt lacks one."""
        if isinstance(references, list):
            return [*map(self._resolve, references)]
        if "plain" in references:
            return [*references["plain"]]
        dtype, data = references["packed"]
        found: list[Any] = np.frombuffer(data, dtype).tolist()
        return found

    def _resolve(self, reference: Reference) -> Any:
        """Return the object that a reference stands for, created if training made it. Raises ``StateError`` if this attempt lacks
        it."""
        kind, *rest = reference
        if kind == "value":
            return rest[0]
        if kind == "at":
            return self._object_at(rest[0])
        if kind == "covered":
            return self._covered_tensor(rest[0])
        if kind == "new":
            return self._new_object(rest[0])
        if kind == "view":
            path, offset, shape, stride = rest
            return self._covered_tensor(path).detach().as_strided(shape, stride, offset)
        if kind == "tuple":
            return tuple(map(self._resolve, rest[0]))
        if kind == "python":
            return _VALUES[rest[0]][2](rest[1])
        if kind == "address":
            return id(self._resolve(rest[0]))
        if kind == "logger":
            return logging.getLogger(rest[0])
        if kind == "bound":
            return self._method(*rest)
        if kind == "code":
            return _require_imported(rest[0], rest[1])
        if kind == "flag":
            return _require_class(rest[0], rest[1])(rest[2])
        if kind == "member":
            return _require_class(rest[0], rest[1])[rest[2]]
        if kind == "torch":
            return getattr(torch, rest[0])
        if kind == "device":
            return torch.device(rest[0])
        return {"range": range, "slice": slice}[kind](*rest)

    def _method(self, reference: Reference, name: str) -> MethodType:
        """Return the method ``name`` of the object that ``reference`` stands for. Raises ``StateError`` if its class has none."""
        owner = self._resolve(reference)
        kind: type = type(owner)
        if not callable(function := getattr(kind, name, None)):
            raise StateError(f"{kind.__module__}.{kind.__qualname__} has no method {name} this time")
        return MethodType(function, owner)

    def _covered_tensor(self, path: str) -> Any:
        """Return the parameter or buffer that has this path now. Raises ``StateError`` if there is none."""
        root, _, name = path.partition(".")
        owner, _, attribute = name.rpartition(".")
        try:
            return getattr(self._object_at(root).get_submodule(owner), attribute)
        except AttributeError:
            raise StateError(f"{path}: the model has no such parameter or buffer this time") from None

    def _object_at(self, path: str) -> Any:
        """Return the object that the script has built at ``path`` in this attempt. Raises ``StateError`` if there is none."""
        if path not in self._built.nodes:
            raise StateError(f"{path}: the script has built no such object this time")
        return self._built.nodes[path].item

    def _new_object(self, number: int) -> Any:
        """Return object ``number`` of those that training made; the first call creates it. None if the checkpoint lacks its
        content."""
        if self._new[number] is None:
            return None
        if number not in self._created:
            kind, content = self._new[number]["kind"], self._new[number]["content"]
            if kind == "tuple":
                items = self._resolve_all(content["items"])
                self._created[number] = (
                    _require_class(*content["class"])(*items) if "class" in content else tuple(items)
                )
            else:
                self._created[number] = self._empty(kind, content)
                if kind == "tensor":
                    self._set_attributes(self._created[number], content)
                elif kind not in ("array", "bytes", "other") and content.get("type") != "frozenset":
                    self._fill("", self._created[number], kind, content)
        return self._created[number]

    def _empty(self, kind: str, content: Any) -> Any:
        """Return a new object of this kind. Contents that ``_fill`` can put in later may be missing."""
        if kind == "tensor":
            value = content["value"]
            return (
                nn.Parameter(value, content["trained"])
                if content["parameter"]
                else value.requires_grad_(content["trained"])
            )
        if kind == "array":
            return content
        if kind == "bytes":
            return array(content["type"], content["value"]) if content["type"] else bytearray(content["value"])
        if kind == "generator":
            made = content["made"]
            return {"random": random.Random, "torch": torch.Generator}[made]() if isinstance(made, str) else made
        if kind == "object":
            return _new_instance(_require_class(*content["class"]))
        if kind == "other":
            return _LOCKS[content["type"]]()
        if content["type"] == "deque":
            return deque(maxlen=content["longest"])
        if content["type"] == "defaultdict":
            factory = content["factory"]
            return defaultdict(_find_by_name(*factory) if factory[0] else None)
        if content["type"] == "frozenset":
            return frozenset(self._resolve_all(content["items"]))
        return _TYPES[content["type"]]()


def _set(item: Any, name: str, value: Any) -> None:
    """Set an attribute without calling a property or ``__setattr__`` of the class, except for a tensor."""
    kind: type = type(item)
    if isinstance(item, torch.Tensor):
        setattr(item, name, value)
    elif hasattr(item, "__dict__") and name not in slots_of(kind):
        vars(item)[name] = value
    else:
        object.__setattr__(item, name, value)


def _remove(item: Any, name: str) -> None:
    """Remove an attribute, if there is one, without calling ``__delattr__`` of the class; a tensor's gradient is set to None."""
    kind: type = type(item)
    if isinstance(item, torch.Tensor) and name == "grad":
        item.grad = None
    elif name in slots_of(kind):
        with suppress(AttributeError):
            object.__delattr__(item, name)
    else:
        vars(item).pop(name, None)


@contextmanager
def _writable(item: np.ndarray[Any, Any]) -> Iterator[None]:
    """Make an array writable for a while. Raises ``ValueError`` if its memory is read-only."""
    if item.flags.writeable:  # such as an array over a tensor's memory, whose flag cannot be set
        yield
        return
    item.flags.writeable = True
    try:
        yield
    finally:
        item.flags.writeable = False


def _fill_tensor(item: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` into ``item``. If shape, dtype or repeated elements do not allow that, ``item`` gets other memory
    instead."""
    with torch.no_grad():
        first = tuple(slice(None) if step else slice(1) for step in item.stride())
        fits = item.shape == value.shape and item.dtype is value.dtype
        if fits and (
            0 not in item.stride() or same_bits(value[first].expand_as(value).contiguous(), value.contiguous())
        ):
            item[first].copy_(value[first])
        else:
            item.data = value.to(item.device)
