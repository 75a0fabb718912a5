"""Records a module's parameters and buffers when DDP wraps it. Later, parameters that differ from this record are refused, and
changes of buffers are saved."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn

from ratchet_contract.errors import StateError, UserError
from ratchet_hooks import torch_compat
from ratchet_worker.state.module_walk import Walk, Walked, as_walk

_TRAINED: Final = attrgetter("requires_grad")


@dataclass(frozen=True)
class Built:
    """A buffer as it was when DDP wrapped the model. ``form``: shape and dtype; ``storage``: the identity of its storage."""

    tensor: weakref.ref[torch.Tensor]
    form: tuple[torch.Size, torch.dtype]
    storage: int


@dataclass(frozen=True)
class Origin:
    """A model's parameters and buffers when DDP wrapped it, by path. ``parameters``: the ``id`` of each parameter, and whether it
    is trained."""

    parameters: dict[str, tuple[int, bool]]
    buffers: dict[str, Built]

    @cached_property
    def ids(self) -> list[tuple[str, int]]:
        """Name and ``id`` of each parameter, in order."""
        return [(name, number) for name, (number, _) in self.parameters.items()]

    @cached_property
    def trained(self) -> list[bool]:
        """Whether each parameter is trained, in order."""
        return [trained for _, trained in self.parameters.values()]


def origin(module: nn.Module) -> Origin:
    """Return the origin of ``module`` as it is now. Call it when the module is wrapped."""
    return Origin(
        {name: (id(p), p.requires_grad) for name, p in module.named_parameters()},
        {name: Built(weakref.ref(b), (b.shape, b.dtype), _storage(b)) for name, b in _buffers(module)},
    )


def check_parameters_unchanged(module: Walked, before: Origin) -> None:
    """Raise ``UserError`` for a parameter that was added, removed, replaced or unfrozen since ``before``."""
    walk = as_walk(module)
    built, same = walk.cached("built", lambda: (before, [(n, id(p)) for n, p in walk.named_parameters()] == before.ids))
    if same and built is before and trained_flags(walk) == before.trained:
        return
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


def trained_flags(walk: Walk) -> list[bool]:
    """Return the current ``requires_grad`` of each parameter, in order."""
    return [*map(_TRAINED, walk.all_parameters)]


def changed_buffers(module: Walked, before: Origin) -> dict[str, Any]:
    """Return the changes of buffers since ``before``, by kind. The kind ``parted`` has the names of buffers with new memory that
    another buffer or parameter shares; a resume does not restore the sharing."""
    now = dict(_buffers(module))
    built: dict[int, str] | None = None  # computed only if a buffer is another tensor
    # made: another tensor than the built one (True: in state_dict); moved: a built buffer under another name; same: an earlier
    # made one; resized: another shape, dtype or memory (True: the original memory, of which other tensors may be views).
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
        made[name] = torch_compat.is_persistent(module.get_submodule(owner), attribute)
        built = built_names(before) if built is None else built
        if id(buffer) in built:
            moved[name] = built[id(buffer)]
        elif first.setdefault(id(buffer), name) != name:
            same[name] = first[id(buffer)]
    gone = sorted(set(before.buffers) - set(now))
    new = [name for name in made if name not in moved] + [name for name, own in resized.items() if not own]
    parted = sorted(_sharing(module, now, new)) if new else []
    return {"made": made, "moved": moved, "same": same, "resized": resized, "gone": gone, "parted": parted}


def _sharing(module: Walked, buffers: dict[str, torch.Tensor], names: list[str]) -> Iterator[str]:
    """Return those of ``names`` whose memory is shared with another parameter or buffer of the model."""
    tensors = {id(t): t for t in (*module.parameters(), *buffers.values())}
    sharers = Counter(_storage(t) for t in tensors.values() if t.layout is torch.strided and t.numel())
    return (name for name in names if sharers[_storage(buffers[name])] > 1)


def make_buffers(module: nn.Module, changed: dict[str, Any], saved: dict[str, torch.Tensor]) -> None:
    """Give a freshly built module the buffers that it had in training, without their elements. ``changed``: from
    ``changed_buffers``. Raises ``StateError`` if a part is missing."""
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
            setattr(holder, attribute, None)
            continue
        tensor = built.get(moved[name]) if name in moved else new.get(same.get(name, name))
        if tensor is not None:
            vars(holder).pop(attribute, None)
            holder.register_buffer(attribute, tensor, persistent=made[name])


def _resize(buffer: torch.Tensor, form: torch.Tensor, own: bool) -> None:
    """Give ``buffer`` the shape and dtype of ``form``; the elements are not set. ``own``: keep the buffer's storage, unless the
    dtype changes."""
    if own and buffer.dtype is form.dtype:
        buffer.resize_(form.shape)
    else:
        buffer.data = torch.empty_like(form, device=buffer.device)


def is_compiled(module: nn.Module) -> bool:
    """True if ``module``, or any part of it, is called through torch.compile."""
    # By name: importing torch._dynamo takes a second.
    return any(torch_compat.is_compiled(part) or type(part).__name__ == "OptimizedModule" for part in module.modules())


def built_names(before: Origin) -> dict[int, str]:
    """Return, by ``id``, the first name that each buffer had at the origin, of those buffers that still exist."""
    found = dict[int, str]()
    for name, one in before.buffers.items():
        if (tensor := one.tensor()) is not None:
            found.setdefault(id(tensor), name)
    return found


def buffer_forms(walk: Walk) -> list[tuple[int, torch.Size, torch.dtype]]:
    """Return the storage's identity, shape and dtype of each buffer, in order."""
    return [(_storage(b), b.shape, b.dtype) for _, b in _buffers(walk)]


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; 0 for a tensor that is not strided."""
    return torch_compat.storage_id(tensor) if tensor.layout is torch.strided else 0


def _buffers(module: Walked) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all buffers with their names; one with several names is there under each of them."""
    return module.named_buffers(remove_duplicate=False)
