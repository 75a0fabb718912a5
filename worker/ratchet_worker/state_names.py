"""Under which keys a module's ``state_dict`` has the tensors that a checkpoint keeps by parameter and buffer.

A checkpoint holds every tensor once and every buffer; ``state_dict`` names a tied parameter twice, leaves out buffers that are
not persistent, and may have keys of its own. What is recorded here gives its keys back without the user's code.
"""

from __future__ import annotations

from typing import Any, Final

from ratchet_hooks.codec import is_dense
from ratchet_worker.walk import Walk, Walked, walk_of

COMPONENT: Final = "model/keys"  # no registered object has a slash in its name
_METHODS: Final = frozenset(("state_dict", "_save_to_state_dict", "get_extra_state"))


def capture(module: Walked) -> dict[str, Any]:
    """JSON: ``keys``, pairs of a key and the stored name (``model/<parameter>``, ``buffers/<buffer>``; None: of neither), in
    ``state_dict``'s order; ``strides`` of parameters that do not lie row-major; ``error``: why there are no keys."""
    walk = walk_of(module)
    if not _follows(walk):
        return _capture(walk)
    known = walk.derived("state names", dict[Any, dict[str, Any]])
    forms = tuple(None if p.is_contiguous() else (p.shape, p.stride()) for p in walk.parameters())
    if forms not in known:
        known.clear()
        known[forms] = _capture(walk)
    return known[forms]


def _follows(walk: Walk) -> bool:
    """Do the keys follow from the names of parts, parameters and buffers alone? Not from hooks or methods of the user's."""
    own = walk.derived("own state_dict", lambda: walk.overrides(_METHODS, parts=True))
    return not own and not any(
        part._state_dict_hooks or part._state_dict_pre_hooks or not _METHODS.isdisjoint(vars(part))
        for _, part in walk.named_modules()
    )


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
