"""Under which keys a module's ``state_dict`` has the tensors that a checkpoint keeps by parameter and buffer.

A checkpoint holds every tensor once and every buffer; ``state_dict`` names a tied parameter twice, leaves out buffers that are
not persistent, and may have keys of its own. What is recorded here gives its keys back without the user's code.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Final

from ratchet_hooks.codec import is_dense
from ratchet_hooks.torch_compat import state_dict_hooks
from ratchet_worker.walk import Walk, Walked, walk_of

COMPONENT: Final = "model/keys"  # no registered object has a slash in its name
_METHODS: Final = frozenset(("state_dict", "_save_to_state_dict", "get_extra_state"))


def capture(module: Walked, form: object = None) -> dict[str, Any]:
    """JSON: ``keys``, pairs of a key and the stored name (``model/<parameter>``, ``buffers/<buffer>``; None: of neither), in
    ``state_dict``'s order; ``strides`` of parameters that do not lie row-major; ``error``: why there are no keys. ``form``:
    the same object as long as the parameters have the same shapes and strides; None: nobody knows."""
    walk = walk_of(module)
    if not _follows(walk):
        return _capture(walk)
    known = walk.derived("state names", dict[Any, dict[str, Any]])
    forms = form or tuple(None if p.is_contiguous() else (p.shape, p.stride()) for p in walk.parameters())
    if forms not in known:
        known.clear()
        known[forms] = _capture(walk)
    return known[forms]


def _follows(walk: Walk) -> bool:
    """Do the keys follow from the names of parts, parameters and buffers alone? Not from hooks or methods of the user's."""
    own = walk.derived("own state_dict", lambda: walk.overrides(_METHODS, parts=True))
    return not own and walk.derived("own state_dict hooks", lambda: _Hooks(walk)).none()


class _Hooks:
    """Where a module's parts have the hooks, and methods, that ``state_dict`` calls."""

    def __init__(self, walk: Walk) -> None:
        self._walk, self._seen = walk, object()
        self._hooks: list[Sized] = []
        self._methods = False

    def none(self) -> bool:
        walk = self._walk
        if self._seen is not walk.attributes:
            parts = [part for _, part in walk.named_modules()]
            self._hooks = [hooks for part in parts for hooks in state_dict_hooks(part)]
            self._methods = not all(map(_METHODS.isdisjoint, map(vars, parts)))
            self._seen = walk.attributes
        return not self._methods and not any(self._hooks)


def _capture(module: Walk) -> dict[str, Any]:
    stored = {id(b): f"buffers/{name}" for name, b in module.named_buffers()}
    stored |= {id(p): f"model/{name}" for name, p in module.named_parameters()}
    strides = {n: list(p.stride()) for n, p in module.named_parameters() if not p.is_contiguous() and is_dense(p)}
    try:
        state = module.state_dict(keep_vars=True)
        keys = [[str(key), stored.get(id(value))] for key, value in state.items()]
    except Exception as error:  # of the user's own state_dict: training does not depend on it
        return {"keys": None, "strides": strides, "error": f"{type(error).__name__}: {error}"[:500]}
    return {"keys": keys, "strides": strides, "error": None}
