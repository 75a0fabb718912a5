"""What training made of attributes of a module's parts that are neither parameters nor buffers, since DDP took the module."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from ratchet_contract.errors import StateError
from ratchet_hooks.torch_compat import version_of
from ratchet_worker.same import Contents, is_constant
from ratchet_worker.walk import Walk, Walked, walk_of

_SCALARS: Final = (int, float, bool, str, type(None))
_CONTAINERS: Final = (list, tuple, dict, deque)
_TORCHS_OWN: Final = frozenset(vars(nn.Module()))
_DEPTH: Final = 4
_ITEMS: Final = 256  # of a container that are looked at

_Owner: TypeAlias = tuple[str | None, torch.Tensor]
_Found: TypeAlias = tuple[dict[str, Any], list[str]]


@dataclass(frozen=True)
class Mark:
    """An attribute's value at one time. ``seen`` is compared; ``kept`` keeps tensors alive, so that no other gets their ids."""

    seen: Any
    kept: Any


def marks(module: nn.Module) -> dict[str, Mark]:
    """By path from the module's root; to be taken when the module is wrapped."""
    owned = _Owned(Walk(module), None)
    return {
        f"{path}.{name}" if path else name: Mark(_seen(value, owned), value)
        for path, part in module.named_modules()
        for name, value in _attributes(part)
    }


def changed(
    module: Walked, before: Mapping[str, Mark], built: Callable[[], Mapping[int, str]]
) -> tuple[dict[str, Any], list[str]]:
    """Plain numbers and strings that training changed, with their values; and names of what holds tensors or numbers, cannot be
    told from a passing result, and is not stored (an enumeration's member, a list of losses). ``built``: the names that buffers
    had at first, by the id of those that are still there."""
    walk = walk_of(module)
    looks = _looks(walk)
    owned = _Owned(walk, built)
    scalars: dict[str, Any] = {}
    others: list[str] = []
    for look in looks:
        more, odd = look.found if look.holds() else look.again(before, owned)
        if more or odd:
            scalars |= more
            others += odd
    return scalars, sorted(others)


def fixed(walk: Walk) -> bool:
    """Does ``changed``, which was asked just now, give the same again as long as ``walk.attributes`` is the same?"""
    return all(look.holds() for look in _looks(walk))


def _looks(walk: Walk) -> list[_Look]:
    return walk.derived("attributes", lambda: [_Look(path, part) for path, part in walk.named_modules()])


def put_back(module: nn.Module, scalars: Mapping[str, Any]) -> None:
    """Raises ``StateError`` for a part that the model has no longer."""
    for name, value in scalars.items():
        owner, _, attribute = name.rpartition(".")
        try:
            holder = module.get_submodule(owner)
        except AttributeError:
            raise StateError(f"attribute {name!r}, whose place the model has no longer") from None
        vars(holder)[attribute] = value  # where it was found: a class may have a property of that name


class _Look:
    """One part, from save to save. Where it has nothing that is looked into and may change within itself, another look is needed
    only once an attribute is another object."""

    def __init__(self, path: str, part: nn.Module) -> None:
        self._prefix, self._part, self._held = f"{path}." if path else "", part, vars(part)
        self._contents: Contents | None = None
        self.found: _Found = {}, []

    def holds(self) -> bool:
        return self._contents is not None and self._contents.hold((self._held,))

    def again(self, before: Mapping[str, Mark], owned: _Owned) -> _Found:
        scalars: dict[str, Any] = {}
        others: list[str] = []
        for name, value in _attributes(self._part):
            mark, seen = before.get(path := f"{self._prefix}{name}"), _seen(value, owned)
            if mark is not None and mark.seen == seen:
                continue
            if type(value) in _SCALARS:
                scalars[path] = value
            elif seen is not None:
                others.append(path)
        fixed = all(_fixed(value) for name, value in self._held.items() if name not in _TORCHS_OWN)
        self._contents = Contents((self._held,)) if fixed else None
        self.found = scalars, others
        return scalars, others


class _Owned:
    """By place in memory, the first parameter or buffer that lies there; buffers under the names that they had at first."""

    def __init__(self, module: Walk, built: Callable[[], Mapping[int, str]] | None) -> None:
        self._module, self._built = module, built

    def of(self, tensor: torch.Tensor) -> _Owner | None:
        return self._places.get(tensor.untyped_storage().data_ptr())

    @cached_property
    def _places(self) -> dict[int, _Owner]:
        """Made when the first tensor asks: most modules have none among their attributes."""
        places: dict[int, _Owner] = {}
        for name, parameter in self._module.named_parameters():
            if parameter.layout is torch.strided:
                places.setdefault(parameter.untyped_storage().data_ptr(), (name, parameter))
        built = None if self._built is None else self._built()
        for name, tensor in self._module.named_buffers(remove_duplicate=False):
            if tensor.layout is torch.strided:
                was = name if built is None else built.get(id(tensor))
                places.setdefault(tensor.untyped_storage().data_ptr(), (was, tensor))
        return places


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(part).items():
        if name not in _TORCHS_OWN and isinstance(value, (*_SCALARS, *_CONTAINERS, torch.Tensor)):
            yield name, value


def _fixed(value: Any) -> bool:
    """Whether a value stays what it is for as long as it is the same object."""
    return is_constant(value) or not isinstance(value, (*_CONTAINERS, torch.Tensor))


def _seen(value: Any, owned: _Owned, depth: int = 0) -> Any:
    """What two looks at a value are compared by; None: it carries nothing over. What lies in a parameter's or buffer's memory is
    saved with it, and only which part of which it is can be lost."""
    if isinstance(value, _SCALARS):
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        # With a graph it belongs to the step that made it.
        lone = value.grad_fn is None and not isinstance(value, nn.Parameter) and value.layout is torch.strided
        if not lone:
            return None
        owner = owned.of(value)
        if owner is None:
            return (id(value), version_of(value))
        name, whole = owner
        part = None if value is whole else (value.dtype, value.storage_offset(), value.shape, value.stride())
        return (name, part)
    if not isinstance(value, _CONTAINERS) or depth == _DEPTH:
        return None
    items = [*value.items()] if isinstance(value, dict) else [*value]
    parts = [_seen(item, owned, depth + 1) for item in items[-_ITEMS:]]
    return (type(value), len(items), tuple(parts)) if any(part is not None for part in parts) else None
