"""A module's parts, parameters and buffers, found once: torch walks through the whole module for each of its own lists of them,
a save asks for some twenty while training waits, and from save to save they are mostly the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from operator import is_
from typing import Any, Final, TypeVar

import torch
from torch import nn

from ratchet_hooks.torch_compat import MODULE_TABLES, non_persistent, own_buffers
from ratchet_worker.same import Contents

T = TypeVar("T")

_LISTS: Final = ("named_modules", "named_parameters", "named_buffers")
_Vars = dict[str, Any]


class Walk:
    """What ``nn.Module``'s methods of the same names give, as long as the module is not changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._stand: _Stand | None = None
        self._derived: dict[str, Any] = {}

    def again(self) -> Walk:
        """This one, where the module still has the very same parts, parameters and buffers under the same names; else a new one.
        A tensor may have other memory, shape or dtype all the same."""
        own = self.overrides(_LISTS)
        if not own and self._stand is not None and self._stand.holds():
            return self
        new = Walk(self.module)
        parts = [part for _, part in new.named_modules()]
        own = own or new.overrides(("named_modules",), parts=True)  # which lists what lies below it
        plain = not own and all(type(vars(part).get(name)) is dict for part in parts for name in MODULE_TABLES)
        new._stand = _Stand(parts) if plain else None
        return new

    @property
    def attributes(self) -> object:
        """The same object as long as no part has another attribute than it had, or another value under the name of one, by the
        last ``again``. A value that changes within itself is not seen."""
        return object() if self._stand is None else self._stand.attributes

    def derived(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` gave for this walk the first time. It must follow from names, types and places alone."""
        if name not in self._derived:
            self._derived[name] = make()
        found: T = self._derived[name]
        return found

    def overrides(self, methods: Iterable[str], *, parts: bool = False) -> bool:
        """Has the module (``parts``: or one of its parts) a method of its own in place of one of these of ``nn.Module``?"""
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
        return [parameter for _, parameter in self._parameters]

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        if self._stand is None:
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
        """Name, and where the buffer is, not which: one that is replaced is not kept alive here."""
        found = dict[int, tuple[str, _Vars, str]]()
        for name, held, key in _buffers(self._parts):
            found.setdefault(id(held[key]), (name, held, key))
        return list(found.values())

    @cached_property
    def _all_buffers(self) -> list[tuple[str, _Vars, str]]:
        return _buffers(self.module.named_modules(remove_duplicate=False))


class _Stand:
    """What every part was at one time: of the same class, with the same dictionaries, in them the same names and the very same
    objects. A buffer that has been replaced is not kept alive by it; a part and its parameters are, until the next ``again``."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self._parts, self._types, self._vars = parts, [*map(type, parts)], [*map(vars, parts)]
        self._held = self._dictionaries()
        self._own, self._contents = Contents(self._vars), Contents(self._held)
        self._with_buffers = [part for part in parts if own_buffers(part)]
        self._passing = [*map(frozenset, self._non_persistent())]
        self.attributes = object()

    def holds(self) -> bool:
        if [*map(type, self._parts)] != self._types or not all(map(is_, map(vars, self._parts), self._vars)):
            return False
        if not self._own.hold(self._vars):
            if not all(map(is_, self._dictionaries(), self._held)):
                return False
            self._own, self.attributes = Contents(self._vars), object()
        return self._contents.hold(self._held) and [*self._non_persistent()] == self._passing

    def _dictionaries(self) -> list[_Vars]:
        return [one[name] for one in self._vars for name in MODULE_TABLES]

    def _non_persistent(self) -> Iterator[set[str]]:
        return map(non_persistent, self._with_buffers)


def _buffers(parts: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, _Vars, str]]:
    held = ((path, own_buffers(part)) for path, part in parts)
    return [(f"{path}.{k}" if path else k, one, k) for path, one in held for k, b in one.items() if b is not None]


Walked = nn.Module | Walk
"""What may be asked for its parts."""


def walk_of(module: Walked) -> Walk:
    return module if isinstance(module, Walk) else Walk(module)
