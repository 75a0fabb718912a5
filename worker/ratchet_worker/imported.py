"""A job that begins with a model of other programs: safetensors, or a PyTorch checkpoint that needs no code to be read.

The only place where Ratchet calls ``torch.load``: with ``weights_only=True``, which builds tensors and plain values and calls
nothing else that a pickle may name.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ratchet_contract.errors import UserError
from ratchet_contract.messages import LaunchFile
from ratchet_contract.plural import counted, first_of
from ratchet_contract.resume import ComponentReport
from ratchet_hooks.states import same_bits
from ratchet_worker.snapshot import Tensors

_MODELS: Final = ("state_dict", "model_state_dict", "model", "module")
_OPTIMIZERS: Final = ("optimizer", "optimizer_state_dict")
_NUMBERS: Final = ("?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d")
_OF_PARAMETERS: Final = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})
"""What torch's optimizers keep in a parameter's own shape; ``load_state_dict`` does not look at shapes."""
_SHOWN: Final = 3


@dataclass
class Imported:
    """What was taken from the file, and what waits for the optimizers."""

    where: str
    model: str
    optimizer: Any = None
    has_hook: bool = False


def load(launch: LaunchFile, module: nn.Module) -> Imported:
    """Put the file's model into ``module``, on every rank alike.

    Raises ``UserError`` for a file that is not safe or not whole, and for a model that does not fit, by the key.
    """
    start = launch.spec.start_from
    assert start is not None and launch.start_file is not None
    data = read(Path(launch.start_file), start.path)
    found = model_of(data, start.path)
    notes = fit(module, found, start.path)
    where = f"{start.path} (digest {(launch.resolved.start_digest or '')[:16]})"
    optimizer = None
    if start.optimizer:
        optimizer = next((data[key] for key in _OPTIMIZERS if isinstance(data.get(key), Mapping)), None)
        if optimizer is None:
            raise _wrong("import-mismatch", f"{start.path} has no optimizer under {' or '.join(_OPTIMIZERS)}: set "
                    "start_from.optimizer to false")  # fmt: skip
    hook = data.get("comm_hook_state") is not None
    return Imported(where, "; ".join([f"from {where}", *notes]), optimizer, hook)


def read(file: Path, name: str) -> Mapping[str, Any]:
    """The file's content on the CPU; ``name``: as the user calls it. Raises ``UserError``; runs nothing of the file's."""
    if name.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(file)
        except (SafetensorError, ValueError, OSError) as error:
            raise _wrong("import-unreadable", f"{name} is not a whole safetensors file: {error}") from error
    try:
        with torch.serialization.safe_globals(_plain_classes()):
            data = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _wrong(
            "import-refused",
            f"{name} needs {_named(file, error)} to be read, which could run any code, so it was not: save what torch.load takes "
            "with weights_only=True, torch.save(model.state_dict(), ...), or safetensors",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise _wrong("import-unreadable", f"{name} is not a whole PyTorch checkpoint: {_line(error)}") from error
    if not isinstance(data, Mapping):
        raise _wrong(
            "import-mismatch", f"{name} holds a {type(data).__name__}, not a state_dict: save model.state_dict()"
        )
    return data


def _plain_classes() -> list[Any]:
    """What checkpoints often hold beside tensors and does nothing when it is made: numpy's numbers and arrays, arguments."""
    from numpy._core.multiarray import _reconstruct, scalar

    return [_reconstruct, scalar, np.ndarray, np.dtype, *(type(np.dtype(c)) for c in _NUMBERS), argparse.Namespace]


def _named(file: Path, error: Exception) -> str:
    """The globals that are not safe; found without loading."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # of an old or broken format
        found = []
    named = sorted(found)[:5] or re.findall(r"GLOBAL ([\w.]+)", str(error))[:1]
    return ", ".join(named) or "more than tensors and plain values"


def model_of(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The state_dict in a checkpoint: under a usual key, or the whole of it. Raises ``UserError``."""
    for key in _MODELS:
        inner = data.get(key)
        if isinstance(inner, Mapping) and any(isinstance(v, torch.Tensor) for v in inner.values()):
            return dict(inner)
    if any(isinstance(value, torch.Tensor) for value in data.values()):
        return dict(data)
    raise _wrong(
        "import-mismatch",
        f"{name} has no state_dict: neither under {', '.join(_MODELS)}, nor is it one; its keys are {_some(map(str, data))}",
    )


def fit(module: nn.Module, found: dict[str, Any], name: str) -> list[str]:
    """Copy ``found`` into ``module``; returns what was cast, or is missing without harm. Raises ``UserError`` naming keys."""
    live = module.state_dict(keep_vars=True)
    found = _renamed(found, live)
    extra = {key for key in live if key.rpartition(".")[2] == "_extra_state"}
    twins = _twins(live)
    missing = [k for k in live if k not in found and k not in extra and not any(t in found for t in twins.get(k, ()))]
    unknown = [k for k in found if k not in live]
    if missing or unknown:
        parts = [f"{name} lacks {_some(missing)}"] if missing else []
        parts += [f"the model has no {_some(unknown)}"] if unknown else []
        raise _wrong(
            "import-mismatch", f"{'; '.join(parts)}: start_from needs the very model that the file was saved of"
        )
    tensors = [key for key in found if key not in extra]
    for key in tensors:
        _check(key, found[key], live[key], name)
    cast: Tensors = {key: found[key] for key in tensors if found[key].dtype is not live[key].dtype}
    for key in tensors:
        for other in twins.get(key, ()):
            if other in found and not same_bits(found[other], found[key]):
                raise _wrong("import-mismatch", f"{key} and {other} are one tensor in the model, but differ in {name}")
    try:
        module.load_state_dict(found, strict=False)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise _wrong("import-mismatch", f"the model does not take {name}: {error}") from error
    notes = []
    if cast:
        key = min(cast)
        notes.append(f"{counted(len(cast), 'tensor')} cast, like {key}: {cast[key].dtype} to {live[key].dtype}")
    if lost := sorted(extra - set(found)):
        notes.append(f"without extra state: {_some(lost)}")
    return notes


def _renamed(found: dict[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Without what DDP (``module.``) and torch.compile (``_orig_mod.``) put before names, on either side."""
    if set(found) == set(live):
        return found
    ours = {key.replace("_orig_mod.", ""): key for key in live}
    wrapped = all(key.startswith("module.") for key in found) and not all(key.startswith("module.") for key in live)
    out = {}
    for key, value in found.items():
        bare = (key.removeprefix("module.") if wrapped else key).replace("_orig_mod.", "")
        out[ours.get(bare, bare)] = value
    return out


def _twins(live: Mapping[str, Any]) -> dict[str, list[str]]:
    """By key: the other keys of the same tensor."""
    by_tensor: dict[int, list[str]] = {}
    for key, value in live.items():
        if isinstance(value, torch.Tensor):
            by_tensor.setdefault(id(value), []).append(key)
    return {key: [k for k in keys if k != key] for keys in by_tensor.values() if len(keys) > 1 for key in keys}


def _check(key: str, value: Any, live: Any, name: str) -> None:
    if not isinstance(value, torch.Tensor) or not isinstance(live, torch.Tensor):
        raise _wrong(
            "import-mismatch", f"{key} of {name} is a {type(value).__name__}, in the model a {type(live).__name__}"
        )
    if value.shape != live.shape or value.is_complex() is not live.is_complex():
        have, want = (f"{t.dtype} {list(t.shape)}" for t in (value, live))
        raise _wrong("import-mismatch", f"{key} is {have} in {name}, in the model {want}")


def report(imported: Imported, rank: int, optimizers: Mapping[str, Optimizer], others: Iterable[str], *, stateful_hook: bool
           ) -> list[ComponentReport]:  # fmt: skip
    """Give the optimizer its state, and tell what every component begins with. Raises ``UserError``."""

    def of(component: str, reason: str, *, taken: bool = False) -> ComponentReport:
        status: Any = "imported" if taken else "absent"
        return ComponentReport(component=component, rank=rank, status=status, reason=reason)

    out = [of("model", imported.model, taken=True)]
    anew = "nothing of it was taken from the file; it starts anew"
    for component, optimizer in optimizers.items():
        taken = component == "optimizer" and imported.optimizer is not None
        if taken:
            _load_optimizer(optimizer, imported)
        out.append(of(component, f"from {imported.where}" if taken else anew, taken=taken))
    if imported.optimizer is not None and "optimizer" not in optimizers:
        raise _wrong("import-mismatch", "start_from.optimizer is true, and no optimizer is registered under that name")
    out += [of(component, anew) for component in others]
    if imported.has_hook or stateful_hook:
        has = (
            "the file's comm_hook_state belongs to one rank of another DDP and its buckets; "
            if imported.has_hook
            else ""
        )
        out.append(of("hook", f"{has}the hook starts anew"))
    return out


def _load_optimizer(optimizer: Optimizer, imported: Imported) -> None:
    try:
        optimizer.load_state_dict(dict(imported.optimizer))
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise _wrong("import-mismatch", f"the optimizer does not take the one of {imported.where}: {error}") from error
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if key in _OF_PARAMETERS and isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                text = f"is {list(value.shape)}, its parameter {list(parameter.shape)}: it is of another model"
                raise _wrong("import-mismatch", f"{key} of the optimizer in {imported.where} {text}")


def _some(names: Iterable[str]) -> str:
    return first_of([repr(name) for name in sorted(names)], _SHOWN)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _wrong(code: str, text: str) -> UserError:
    return UserError(text, code=code)
