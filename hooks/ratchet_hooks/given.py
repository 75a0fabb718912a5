"""A hook of the user's own as objects that are there already, in place of import paths."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ratchet_hooks.algorithm import Algorithm, Setup, on_nccl
from ratchet_hooks.custom import Custom
from ratchet_hooks.specs import CustomSpec


def describe(state: object, function: Callable[..., Any]) -> dict[str, Any]:
    """A spec's values for them: where they come from. A state that is a process group, or None, is none that could be saved."""
    values: dict[str, Any] = {"name": "custom", "hook": _path(function)}
    if state is not None and not isinstance(state, dist.ProcessGroup):
        values["state"] = _path(type(state))
    return values


class Given(Custom):
    """``function`` with ``state``, under a spec that only names them."""

    def __init__(self, function: Callable[..., Any], state: Any, spec: CustomSpec, setup: Setup) -> None:
        """Raises ``CustomHookError`` for a class without a way to save its objects, ``HookStateError`` for a state that cannot be
        saved."""
        Algorithm.__init__(self, setup)
        self.spec, self.state = spec, state
        self._kind = None if spec.state is None else type(state)
        self._hook = function if self._kind is not None else lambda _, bucket: function(state, bucket)
        self._waits = not on_nccl(setup.group, setup.device)
        if self._kind is not None:
            self._encoded()

    def _make(self) -> Any:
        return self.state


def _path(found: Any) -> str:
    """``module:name``, with what is no identifier (of a lambda, or inside of a function) made one."""
    name = getattr(found, "__qualname__", type(found).__qualname__).rpartition(".")[2]
    return f"{found.__module__}:{re.sub(r'[^A-Za-z0-9_]', '_', name)}"
