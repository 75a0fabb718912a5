"""What a module was when DDP took it: whatever it becomes apart from that in training must be saved, or refused by name.

DDP averages the parameters that it was built over. One that is added, replaced or unfrozen later would train apart on every rank.
Buffers may come, go and change their shape; attributes that are no parameters and no buffers may count or carry something over
from step to step.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from ratchet_contract.errors import StateError, UserError
from ratchet_worker.walk import Walked

_SCALARS: Final = (int, float, bool, str, type(None))
_CONTAINERS: Final = (list, tuple, dict, deque)
_TORCHS_OWN: Final = frozenset(vars(nn.Module()))
_DEPTH: Final = 4
_ITEMS: Final = 256  # of a container that are looked at

_Owner: TypeAlias = tuple[str | None, torch.Tensor]


@dataclass(frozen=True)
class Mark:
    """An attribute's value at one time. ``seen`` is compared; ``kept`` keeps tensors alive, so that no other gets their ids."""

    seen: Any
    kept: Any


@dataclass(frozen=True)
class Built:
    """A buffer as it was built: the tensor, shape and dtype, and where its memory is managed."""

    tensor: weakref.ref[torch.Tensor]
    form: tuple[torch.Size, torch.dtype]
    storage: int


@dataclass(frozen=True)
class Origin:
    """By path from the module's root. ``parameters``: id and whether it is trained."""

    parameters: dict[str, tuple[int, bool]]
    buffers: dict[str, Built]
    attributes: dict[str, Mark]


def origin(module: nn.Module) -> Origin:
    """To be taken when the module is wrapped."""
    owned = _owned(module)
    return Origin(
        {name: (id(p), p.requires_grad) for name, p in module.named_parameters()},
        {name: Built(weakref.ref(b), (b.shape, b.dtype), _storage(b)) for name, b in _buffers(module)},
        {name: Mark(_seen(value, owned), value) for name, value in _attributes(module)},
    )


def refuse_changed_parameters(module: Walked, before: Origin) -> None:
    """Raises ``UserError`` for a parameter that DDP does not know. To freeze one is allowed."""
    now = {name: (id(p), p.requires_grad) for name, p in module.named_parameters()}
    for name in sorted(set(now) | set(before.parameters)):
        if name not in before.parameters:
            what = "was added to the model"
        elif name not in now:
            what = "was taken out of the model"
        elif now[name][0] != before.parameters[name][0]:
            what = "was replaced by another one"
        elif now[name][1] and not before.parameters[name][1]:
            what = "was unfrozen"
        else:
            continue
        raise UserError(
            f"parameter {name} {what} after DDP was built, so its gradients are not averaged over the ranks. Give the model all "
            "that it will train before it is wrapped; to train a part later, wrap it unfrozen, under ddp.find_unused_parameters, "
            "and leave it out or freeze it then",
            code="parameters-changed",
        )


def changed_buffers(module: Walked, before: Origin) -> dict[str, Any]:
    """What training made of the buffers, by name. ``made``: another tensor than the built one, and whether a state_dict holds
    it; of these ``moved``: the built one of which name it is, ``same``: which other made one it is. ``resized``: the built tensor
    in another shape, dtype or memory, and whether in its own one, which others may look at. ``gone``: there is none any more.
    ``parted``: names of those whose new memory is also another tensor's of the model, which it will not be again."""
    now = dict(_buffers(module))
    built = _built(before)
    made: dict[str, bool] = {}
    moved, same, resized, first = {}, {}, {}, dict[int, str]()
    for name, buffer in now.items():
        one = before.buffers.get(name)
        if one is not None and one.tensor() is buffer:
            own = _storage(buffer) == one.storage
            if not own or one.form != (buffer.shape, buffer.dtype):
                resized[name] = own
            continue
        owner, _, attribute = name.rpartition(".")
        made[name] = attribute not in module.get_submodule(owner)._non_persistent_buffers_set
        if id(buffer) in built:
            moved[name] = built[id(buffer)]
        elif first.setdefault(id(buffer), name) != name:
            same[name] = first[id(buffer)]
    gone = sorted(set(before.buffers) - set(now))
    tensors = {id(t): t for t in (*module.parameters(), *now.values())}
    sharers = Counter(_storage(t) for t in tensors.values() if t.layout is torch.strided and t.numel())
    new = [name for name in made if name not in moved] + [name for name, own in resized.items() if not own]
    parted = sorted(name for name in new if sharers[_storage(now[name])] > 1)
    return {"made": made, "moved": moved, "same": same, "resized": resized, "gone": gone, "parted": parted}


def make_buffers(module: nn.Module, changed: dict[str, Any], saved: dict[str, torch.Tensor]) -> None:
    """Give a module as it was built the buffers that training gave it, in their shapes. ``changed``: of ``changed_buffers``;
    ``saved``: each tensor under the first of its names. Raises ``StateError`` where the module has no place for one."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    made, moved, same = (changed.get(key, {}) for key in ("made", "moved", "same"))
    built = dict(_buffers(module))
    kept = {name: moved.get(name, name) for name in saved if name in moved or name not in made}
    forms = {id(built[source]): saved[name] for name, source in kept.items() if source in built}
    for name, own in changed.get("resized", {}).items():
        if name in built and (form := forms.get(id(built[name]))) is not None:
            _resize(built[name], form, own)
    new = {name: torch.empty_like(saved[name], device=device) for name in made if name in saved and name not in moved}
    for name in [*made, *changed.get("gone", [])]:
        owner, _, attribute = name.rpartition(".")
        try:
            holder = module.get_submodule(owner)
        except AttributeError:
            raise StateError(f"buffer {name!r}, which the model has no longer") from None
        if name not in made:
            holder._buffers[attribute] = None
            continue
        tensor = built.get(moved[name]) if name in moved else new.get(same.get(name, name))
        if tensor is not None:
            vars(holder).pop(attribute, None)
            holder.register_buffer(attribute, tensor, persistent=made[name])


def _resize(buffer: torch.Tensor, form: torch.Tensor, own: bool) -> None:
    """The same tensor in the shape and dtype of ``form``, so that whatever else refers to it goes on doing so."""
    if own and buffer.dtype is form.dtype:
        buffer.resize_(form.shape)
    else:
        buffer.data = torch.empty_like(form, device=buffer.device)


def changed_attributes(module: Walked, before: Origin) -> tuple[dict[str, Any], list[str]]:
    """Attributes of the module's parts that training changed and that are neither parameters nor buffers: plain numbers and
    strings with their values; and names of what holds tensors or numbers, cannot be told from a passing result, and is not
    stored (an enumeration's member, a list of losses)."""
    owned = _owned(module, _built(before))
    scalars: dict[str, Any] = {}
    others: list[str] = []
    for name, value in _attributes(module):
        mark = before.attributes.get(name)
        if mark is not None and mark.seen == _seen(value, owned):
            continue
        if type(value) in _SCALARS:
            scalars[name] = value
        elif _seen(value, owned) is not None:
            others.append(name)
    return scalars, sorted(others)


def set_attributes(module: nn.Module, scalars: dict[str, Any]) -> None:
    """Put them back. Raises ``StateError`` for a part that the model has no longer."""
    for name, value in scalars.items():
        owner, _, attribute = name.rpartition(".")
        try:
            holder = module.get_submodule(owner)
        except AttributeError:
            raise StateError(f"attribute {name!r}, whose place the model has no longer") from None
        vars(holder)[attribute] = value  # where it was found: a class may have a property of that name


def compiled(module: nn.Module) -> bool:
    """Does torch.compile stand between any part's call and its code?"""
    # By name: importing torch._dynamo takes a second.
    return any(
        part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule" for part in module.modules()
    )


def _owned(module: Walked, built: dict[int, str] | None = None) -> dict[int, _Owner]:
    """By place in memory, the first parameter or buffer that lies there. ``built``: which buffers stood at the origin, by id, and
    their names then; others are not taken for those whose names they have."""
    owned: dict[int, _Owner] = {}
    for name, parameter in module.named_parameters():
        if parameter.layout is torch.strided:
            owned.setdefault(parameter.untyped_storage().data_ptr(), (name, parameter))
    for name, tensor in _buffers(module):
        if tensor.layout is torch.strided:
            was = name if built is None else built.get(id(tensor))
            owned.setdefault(tensor.untyped_storage().data_ptr(), (was, tensor))
    return owned


def _built(before: Origin) -> dict[int, str]:
    """The names that buffers had at the origin, by the id of those that are still there."""
    found = dict[int, str]()
    for name, one in before.buffers.items():
        if (tensor := one.tensor()) is not None:
            found.setdefault(id(tensor), name)
    return found


def _storage(tensor: torch.Tensor) -> int:
    """Which memory it lies in, wherever that is: the same after it grew."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _buffers(module: Walked) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_buffers(remove_duplicate=False)


def _attributes(module: Walked) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _TORCHS_OWN and isinstance(value, (*_SCALARS, *_CONTAINERS, torch.Tensor)):
                yield (f"{path}.{name}" if path else name), value


def _seen(value: Any, owned: dict[int, _Owner], depth: int = 0) -> Any:
    """What two looks at a value are compared by; None: it carries nothing over. What lies in a parameter's or buffer's memory is
    saved with it, and only which part of which it is can be lost."""
    if isinstance(value, _SCALARS):
        return (type(value), value)
    if isinstance(value, torch.Tensor):
        # With a graph it belongs to the step that made it.
        lone = value.grad_fn is None and not isinstance(value, nn.Parameter) and value.layout is torch.strided
        if not lone:
            return None
        owner = owned.get(value.untyped_storage().data_ptr())
        if owner is None:
            return (id(value), value._version)
        name, whole = owner
        part = None if value is whole else (value.dtype, value.storage_offset(), value.shape, value.stride())
        return (name, part)
    if not isinstance(value, _CONTAINERS) or depth == _DEPTH:
        return None
    items = [*value.items()] if isinstance(value, dict) else [*value]
    parts = [_seen(item, owned, depth + 1) for item in items[-_ITEMS:]]
    return (type(value), len(items), tuple(parts)) if any(part is not None for part in parts) else None
