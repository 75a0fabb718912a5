"""Finds optimizers, schedulers and the like that seem to affect the training but were not passed to the Session."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

_KINDS: Final = (Optimizer, LRScheduler, torch.amp.GradScaler, AveragedModel)
_DEPTH: Final = 4
"""How many levels below a registered object, in attributes, lists and dicts, other objects count as its parts."""
_MOST_PARTS: Final = 1000


def find_unregistered(module: nn.Module, optimizers: Iterable[Optimizer], registered: Iterable[object]) -> list[str]:
    """Return the sorted type names of optimizers and the like that seem to affect the training but are not registered. Searches
    all objects that the garbage collector tracks."""
    kept = {id(part) for item in registered for part in _parts(item, _DEPTH)}
    # These are saved with the attributes (``hidden_state``).
    kept |= {id(average) for average in _averages_in_attributes(module)}
    if not _unregistered(module, optimizers, kept):
        return []
    gc.collect()  # removes objects that the script does not use any more
    return sorted({type(item).__name__ for item in _unregistered(module, optimizers, kept)})


def _averages_in_attributes(module: nn.Module) -> Iterator[AveragedModel]:
    """Yield the averages (``AveragedModel``) that the module and its submodules hold in attributes, down to ``_DEPTH`` levels."""
    values = (value for one in module.modules() for value in vars(one).values())
    parts = (part for value in values for part in _parts(value, _DEPTH))
    return (part for part in parts if isinstance(part, AveragedModel))


def unattributable(registered: Iterable[object]) -> Iterator[object]:
    """Yield the gradient scalers and averages among ``registered`` and their parts. A later run in this process cannot recognise
    that these objects are not its own."""
    parts = (part for item in registered for part in _parts(item, _DEPTH))
    return (part for part in parts if isinstance(part, (AveragedModel, torch.amp.GradScaler)))


def unregistered_message(names: Collection[str]) -> str:
    """Return the message for the user about unregistered objects with these type names."""
    return (
        f"{', '.join(names)}: created by the script and not registered, so that no checkpoint has the state and a resume "
        "is not exact: pass it to session.prepare, or to session.register"
    )


def _unregistered(module: nn.Module, optimizers: Iterable[Optimizer], kept: Collection[int]) -> list[object]:
    """Return the objects of the process that seem to affect the training of ``module``. ``kept``: ids of objects to leave out."""
    trained = {id(parameter) for parameter in module.parameters()}
    forms = [_form(one) for one in module.modules()]
    objects = gc.get_objects()
    kinds = {kind for kind in {*map(type, objects)} if issubclass(kind, _KINDS)}  # far fewer types than objects
    items = [item for item in objects if type(item) in kinds]
    of_the_model = [item for item in items if isinstance(item, Optimizer) and _trains(item, trained)]
    unregistered = [item for item in of_the_model if id(item) not in kept and not _wraps(item, kept)]
    stepped = {id(optimizer) for optimizer in (*optimizers, *of_the_model)}
    return [
        *unregistered,
        *(item for item in items if id(item) not in kept and _affects_training(item, stepped, forms)),
    ]


def _form(module: nn.Module) -> list[torch.Size]:
    """Return the shapes of the module's parameters, in order."""
    return [parameter.shape for parameter in module.parameters()]


def _trains(optimizer: Optimizer, trained: Collection[int]) -> bool:
    """True if ``optimizer`` has a parameter among ``trained`` (ids)."""
    groups = getattr(optimizer, "param_groups", ())
    return any(id(parameter) in trained for group in groups for parameter in group["params"])


def _wraps(optimizer: Optimizer, kept: Collection[int]) -> bool:
    """True if ``optimizer`` has an attribute that is an optimizer in ``kept`` (ids)."""
    return any(isinstance(part, Optimizer) and id(part) in kept for part in vars(optimizer).values())


def _affects_training(item: object, optimizers: Collection[int], forms: Collection[list[torch.Size]]) -> bool:
    """True for a scheduler of one of ``optimizers``, an average with one of ``forms``, and an enabled gradient scaler."""
    if isinstance(item, LRScheduler):
        return id(getattr(item, "optimizer", None)) in optimizers
    if isinstance(item, AveragedModel):
        return _form(item) in forms
    return isinstance(item, torch.amp.GradScaler) and item.is_enabled()


def _parts(item: object, depth: int) -> Iterator[object]:
    """Yield the object and those that it holds, down to ``depth`` levels. Contents of long containers, modules, tensors and
    classes, and a scheduler's optimizer, are left out."""
    yield item
    if depth == 0 or isinstance(item, (nn.Module, torch.Tensor, type)):
        return
    inner: Iterable[Any] = ()
    if isinstance(item, (dict, list, tuple)):
        if len(item) <= _MOST_PARTS:
            inner = item.values() if isinstance(item, dict) else item
    elif hasattr(item, "__dict__"):
        # A scheduler's state omits its optimizer.
        left_out = "optimizer" if isinstance(item, LRScheduler) else None
        inner = [part for name, part in vars(item).items() if name != left_out]
    for part in inner:
        yield from _parts(part, depth - 1)
