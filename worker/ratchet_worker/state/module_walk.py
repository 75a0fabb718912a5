"""Caches the lists of a module's parts, parameters and buffers. torch walks through the whole module for each list. A save needs
some twenty lists while training waits, and from save to save they are mostly the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from operator import is_
from typing import Any, Final, TypeVar

import torch
from torch import nn

from ratchet_hooks.torch_compat import MODULE_TABLES, non_persistent_buffers, own_buffers
from ratchet_worker.state.change_detection import Contents

T = TypeVar("T")

_LISTS: Final = ("named_modules", "named_parameters", "named_buffers")
_Vars = dict[str, Any]


class Walk:
    """The parts, parameters and buffers of a module. The methods with names of ``nn.Module`` return what those return; the lists
    of parts, parameters and buffers come from a cache. Call ``updated`` for a walk that is valid after changes of the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._structure: _Stand | None = None
        self._derived: dict[str, Any] = {}

    def updated(self) -> Walk:
        """Return this walk if ``updated`` has made it and the module still has the very same parts, parameters and buffers under
        the same names; else a new walk.

        Memory, shape and dtype of a tensor may have changed nevertheless. A module always gets a new walk if it overrides
        ``named_modules``, ``named_parameters`` or ``named_buffers``, or if one of its parts overrides ``named_modules`` or keeps
        its parts, parameters or buffers in another object than a plain ``dict``.
        """
        own = self.overrides(_LISTS)
        if not own and self._structure is not None and self._structure.matches():
            return self
        new = Walk(self.module)
        parts = [part for _, part in new.named_modules()]
        own = own or new.overrides(("named_modules",), parts=True)  # a part's override affects the parts below it
        plain = not own and all(type(vars(part).get(name)) is dict for part in parts for name in MODULE_TABLES)
        new._structure = _Stand(parts) if plain else None
        return new

    @property
    def attributes(self) -> object:
        """Return an object to compare by identity. While it is the same, no part has had other attributes, or other objects as
        their values, at the last call of ``updated``. It is a new object each time if that cannot be observed. An attribute value
        that is changed in place is not detected."""
        return object() if self._structure is None else self._structure.attributes

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of ``make``, computed once per ``name``. The result must follow from names, types and places of
        parts, parameters and buffers alone."""
        if name not in self._derived:
            self._derived[name] = make()
        found: T = self._derived[name]
        return found

    def overrides(self, methods: Iterable[str], *, parts: bool = False) -> bool:
        """True if the module overrides one of these methods of ``nn.Module``, in its class or on the object. ``parts``: or if one
        of its parts does."""
        asked = [part for _, part in self.named_modules()] if parts else [self.module]
        return any(
            name in vars(one) or getattr(type(one), name) is not getattr(nn.Module, name)
            for one in asked
            for name in methods
        )

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return iter(self._parts)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._parameters)

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self.all_parameters)

    @cached_property
    def all_parameters(self) -> list[nn.Parameter]:
        """All parameters, each once, in order."""
        return [parameter for _, parameter in self._parameters]

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the current buffers with their names. ``remove_duplicate``: one with several names is there only once."""
        if self._structure is None:
            return self.module.named_buffers(remove_duplicate=remove_duplicate)
        places = self._buffers if remove_duplicate else self._all_buffers
        return ((name, held[key]) for name, held, key in places)

    def get_submodule(self, path: str) -> nn.Module:
        return self.module.get_submodule(path)

    def state_dict(self, *, keep_vars: bool) -> Mapping[str, Any]:
        return self.module.state_dict(keep_vars=keep_vars)

    @cached_property
    def _parts(self) -> list[tuple[str, nn.Module]]:
        return list(self.module.named_modules())

    @cached_property
    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())

    @cached_property
    def _buffers(self) -> list[tuple[str, _Vars, str]]:
        """Name and place of each buffer, not the buffer: one that is replaced is not kept alive here."""
        found = dict[int, tuple[str, _Vars, str]]()
        for name, held, key in _buffers(self._parts):
            found.setdefault(id(held[key]), (name, held, key))
        return list(found.values())

    @cached_property
    def _all_buffers(self) -> list[tuple[str, _Vars, str]]:
        """Name and place of each buffer under each of its names."""
        return _buffers(self.module.named_modules(remove_duplicate=False))


class _Stand:
    """The state of all parts at one time: their classes, their dictionaries, and the names and identities of the objects in
    these.

    It does not keep replaced buffers alive. It keeps parts and their parameters alive. ``attributes``: replaced by a new object
    when ``matches`` finds that an attribute of a part has changed.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        self._parts, self._types, self._vars = parts, [*map(type, parts)], [*map(vars, parts)]
        self._held = self._dictionaries()
        self._own, self._contents = Contents(self._vars), Contents(self._held)
        self._with_buffers = [part for part in parts if own_buffers(part)]
        self._non_persistent_names = [*map(frozenset, self._non_persistent())]
        self.attributes = object()

    def matches(self) -> bool:
        """True if the parts still have the same classes, parts, parameters and buffers under the same names, and the same buffers
        are persistent; other attributes may have changed. If they have, ``attributes`` is replaced."""
        if [*map(type, self._parts)] != self._types or not all(map(is_, map(vars, self._parts), self._vars)):
            return False
        if not self._own.matches(self._vars):
            if not all(map(is_, self._dictionaries(), self._held)):
                return False
            self._own, self.attributes = Contents(self._vars), object()
        return self._contents.matches(self._held) and [*self._non_persistent()] == self._non_persistent_names

    def _dictionaries(self) -> list[_Vars]:
        """Return the tables of parts, parameters and buffers of all parts."""
        return [one[name] for one in self._vars for name in MODULE_TABLES]

    def _non_persistent(self) -> Iterator[set[str]]:
        """Return, for each part that had buffers, the names of those that ``state_dict`` omits."""
        return map(non_persistent_buffers, self._with_buffers)


def _buffers(parts: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, _Vars, str]]:
    """Return the name of each buffer of ``parts``, the table that holds it, and its key there."""
    held = ((path, own_buffers(part)) for path, part in parts)
    return [(f"{path}.{k}" if path else k, one, k) for path, one in held for k, b in one.items() if b is not None]


Walked = nn.Module | Walk
"""Objects whose parts can be listed."""


def as_walk(module: Walked) -> Walk:
    """Return ``module`` if it is a walk, else a new walk of it, without cached results."""
    return module if isinstance(module, Walk) else Walk(module)
