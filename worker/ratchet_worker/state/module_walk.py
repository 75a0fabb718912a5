"""Caches the lists of a module's parts, parameters and buffers: for each list torch walks through the whole module."""

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
    """Cached lists of a module's parts, parameters and buffers. After changes of the module, ``updated`` returns a valid walk."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._structure: _Stand | None = None
        self._derived: dict[str, Any] = {}

    def updated(self) -> Walk:
        """Return this walk if the module is known to have the very same parts, parameters and buffers; else a new walk."""
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
        """Return an object that is the same only while ``updated`` finds the same attribute names and values, by identity."""
        return object() if self._structure is None else self._structure.attributes

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of ``make``, which is called only once per ``name``. The result must depend only on parts, names and
        types."""
        if name not in self._derived:
            self._derived[name] = make()
        found: T = self._derived[name]
        return found

    def overrides(self, methods: Iterable[str], *, parts: bool = False) -> bool:
        """True if the module, or with ``parts`` one of its parts, overrides one of these methods of ``nn.Module``."""
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
        """The name of each buffer, the table that holds it, and its key there. The buffers themselves are not in the list, so
        that it does not keep a replaced buffer alive."""
        found = dict[int, tuple[str, _Vars, str]]()
        for name, held, key in _buffers(self._parts):
            found.setdefault(id(held[key]), (name, held, key))
        return list(found.values())

    @cached_property
    def _all_buffers(self) -> list[tuple[str, _Vars, str]]:
        """The name, table and key of each buffer, once for each of its names."""
        return _buffers(self.module.named_modules(remove_duplicate=False))


class _Stand:
    """The attributes of all parts of a module at one time, to notice later changes. ``attributes``: an object that ``matches``
    replaces when it finds a changed attribute."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self._parts, self._types, self._vars = parts, [*map(type, parts)], [*map(vars, parts)]
        self._held = self._dictionaries()
        self._own, self._contents = Contents(self._vars), Contents(self._held)
        self._with_buffers = [part for part in parts if own_buffers(part)]
        self._non_persistent_names = [*map(frozenset, self._non_persistent())]
        self.attributes = object()

    def matches(self) -> bool:
        """True if the parts have the same classes, parts, parameters and buffers. Replaces ``attributes`` if other attributes
        differ."""
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
