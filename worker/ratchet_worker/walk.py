"""A module's parts, parameters and buffers, found once: torch walks through the whole module for each of its own lists of them,
and a save asks for some twenty while training waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T", bound=torch.Tensor)


class Walk:
    """What ``nn.Module``'s methods of the same names give, as long as the module is not changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return iter(self._parts)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._parameters)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._parameters)

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._buffers if remove_duplicate else self._all_buffers)

    def get_submodule(self, path: str) -> nn.Module:
        return self.module.get_submodule(path)

    def state_dict(self, *, keep_vars: bool) -> Mapping[str, Any]:
        return self.module.state_dict(keep_vars=keep_vars)

    @cached_property
    def _parts(self) -> list[tuple[str, nn.Module]]:
        return list(self.module.named_modules())

    @cached_property
    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        if type(self.module).named_parameters is not nn.Module.named_parameters:
            return list(self.module.named_parameters())
        found = (
            (f"{path}.{name}" if path else name, p) for path, m in self._parts for name, p in m._parameters.items()
        )
        return list(_once((name, p) for name, p in found if p is not None))

    @cached_property
    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        if type(self.module).named_buffers is not nn.Module.named_buffers:
            return list(self.module.named_buffers())
        found = ((f"{path}.{name}" if path else name, b) for path, m in self._parts for name, b in m._buffers.items())
        return list(_once((name, b) for name, b in found if b is not None))

    @cached_property
    def _all_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.module.named_buffers(remove_duplicate=False))


def _once(items: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Each tensor under the first of its names."""
    seen: set[int] = set()
    for name, tensor in items:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


Walked = nn.Module | Walk
"""What may be asked for its parts."""
