"""``start_from``: a job starts with a model that another program saved, which is read without running code from the file."""

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

from ratchet_contract.checkpoint.resume_report import ComponentReport
from ratchet_contract.errors import UserError
from ratchet_contract.plural import join_first, pluralize
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_hooks.algorithms.state_version import same_bits
from ratchet_worker.state.snapshot import Tensors

_MODELS: Final = ("state_dict", "model_state_dict", "model", "module")
_OPTIMIZERS: Final = ("optimizer", "optimizer_state_dict")
_NUMBERS: Final = ("?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d")
_PARAMETER_SHAPED: Final = frozenset(
    {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}
)
"""Optimizer state of torch that has the parameter's shape; ``load_state_dict`` does not check shapes."""
_MAX_NAMES: Final = 3
_WRONG_PATHS: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


@dataclass
class Imported:
    """What was imported from the job's start file. ``source``: the file's name and digest. ``model``: text for the report on the
    model. ``optimizer``: the optimizer's state, which is not loaded yet; None if the spec does not request it. ``has_hook``: True
    if the file has a hook's state."""

    source: str
    model: str
    optimizer: Any = None
    has_hook: bool = False


def load(launch: LaunchFile, module: nn.Module) -> Imported:
    """Load the model in the job's start file into ``module``, and return what was imported. Raises ``UserError`` if the file is
    unusable, does not fit, or lacks an optimizer's state that the spec requests."""
    start = launch.spec.start_from
    assert start is not None and launch.start_file is not None
    data = read(Path(launch.start_file), start.path)
    found = find_state_dict(data, start.path)
    notes = load_into(module, found, start.path)
    where = f"{start.path} (digest {(launch.resolved.start_digest or '')[:16]})"
    optimizer = None
    if start.optimizer:
        optimizer = next((data[key] for key in _OPTIMIZERS if isinstance(data.get(key), Mapping)), None)
        if optimizer is None:
            raise _import_error("import-mismatch", f"{start.path} has no optimizer under {' or '.join(_OPTIMIZERS)}: set "
                    "start_from.optimizer to false")  # fmt: skip
    hook = data.get("comm_hook_state") is not None
    return Imported(where, "; ".join([f"from {where}", *notes]), optimizer, hook)


def read(file: Path, name: str) -> Mapping[str, Any]:
    """Return the content of ``file``, without running code from it. The ending of ``name`` decides the format. Raises
    ``UserError`` for a bad or missing file. Raises ``OSError`` if the disk fails; on a shared disk this may be temporary."""
    if name.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(file)
        except (SafetensorError, ValueError, *_WRONG_PATHS) as error:
            raise _import_error("import-unreadable", f"{name} is not a complete safetensors file: {error}") from error
    try:
        # With weights_only=True, torch.load builds tensors, plain values and objects of these classes, and calls nothing else
        # that a pickle may name.
        with torch.serialization.safe_globals(_plain_classes()):
            data = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _import_error(
            "import-refused",
            f"{name} needs {_unsafe_globals(file, error)} to be read, which could run any code, so it was not read: "
            "save a file for torch.load "
            "with weights_only=True, torch.save(model.state_dict(), ...), or safetensors",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, *_WRONG_PATHS) as error:
        raise _import_error(
            "import-unreadable", f"{name} is not a complete PyTorch checkpoint: {_first_line(error)}"
        ) from error
    if not isinstance(data, Mapping):
        raise _import_error(
            "import-mismatch", f"{name} holds a {type(data).__name__}, not a state_dict: save model.state_dict()"
        )
    return data


def _plain_classes() -> list[Any]:
    """Return harmless classes and functions that checkpoints often need besides tensors, such as those of numpy's arrays."""
    from numpy._core.multiarray import _reconstruct, scalar

    return [_reconstruct, scalar, np.ndarray, np.dtype, *(type(np.dtype(c)) for c in _NUMBERS), argparse.Namespace]


def _unsafe_globals(file: Path, error: Exception) -> str:
    """Return the names of up to five globals in ``file`` that neither torch nor ``_plain_classes`` considers safe, as text, if
    known. ``error``: the refusal of ``torch.load``."""
    try:
        with torch.serialization.safe_globals(_plain_classes()):
            found = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # an old or broken format
        found = []
    named = sorted(found)[:5] or re.findall(r"GLOBAL ([\w.]+)", str(error))[:1]
    return ", ".join(named) or "more than tensors and plain values"


def find_state_dict(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the model's state_dict: what ``data`` has under one of the usual keys, or else ``data`` itself. Raises ``UserError``
    if neither is a state_dict. ``name``: the file's name for this error."""
    for key in _MODELS:
        inner = data.get(key)
        if isinstance(inner, Mapping) and any(isinstance(v, torch.Tensor) for v in inner.values()):
            return dict(inner)
    if any(isinstance(value, torch.Tensor) for value in data.values()):
        return dict(data)
    raise _import_error(
        "import-mismatch",
        f"{name} has no state_dict: neither under {', '.join(_MODELS)}, nor is it one; its keys are "
        f"{_format_names(map(str, data))}",
    )


def load_into(module: nn.Module, found: dict[str, Any], name: str) -> list[str]:
    """Copy the state_dict ``found``, from the file ``name``, into ``module``; return notes. Raises ``UserError`` if it does not
    fit."""
    live = module.state_dict(keep_vars=True)
    found = _match_keys(found, live)
    extra = {key for key in live if key.rpartition(".")[2] == "_extra_state"}
    twins = _tied_keys(live)
    missing = [k for k in live if k not in found and k not in extra and not any(t in found for t in twins.get(k, ()))]
    unknown = [k for k in found if k not in live]
    if missing or unknown:
        parts = [f"{name} lacks {_format_names(missing)}"] if missing else []
        parts += [f"the model has no {_format_names(unknown)}"] if unknown else []
        raise _import_error(
            "import-mismatch", f"{'; '.join(parts)}: start_from needs the same model as the one in the file"
        )
    tensors = [key for key in found if key not in extra]
    for key in tensors:
        _check(key, found[key], live[key], name)
    cast: Tensors = {key: found[key] for key in tensors if found[key].dtype is not live[key].dtype}
    for key in tensors:
        for other in twins.get(key, ()):
            if other in found and not same_bits(found[other], found[key]):
                raise _import_error(
                    "import-mismatch", f"{key} and {other} are one tensor in the model, but differ in {name}"
                )
    try:
        module.load_state_dict(found, strict=False)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise _import_error("import-mismatch", f"the model cannot load {name}: {error}") from error
    notes = []
    if cast:
        key = min(cast)
        notes.append(f"{pluralize(len(cast), 'tensor')} cast, like {key}: {cast[key].dtype} to {live[key].dtype}")
    if lost := sorted(extra - set(found)):
        notes.append(f"without extra state: {_format_names(lost)}")
    return notes


def _match_keys(found: dict[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``found`` with the keys of ``live``, where the two differ only by what torch.compile or DDP adds to a key. If the
    keys are not all the same, other keys of ``found`` lose these additions too."""
    if set(found) == set(live):
        return found
    ours = {key.replace("_orig_mod.", ""): key for key in live}
    wrapped = all(key.startswith("module.") for key in found) and not all(key.startswith("module.") for key in live)
    out = {}
    for key, value in found.items():
        bare = (key.removeprefix("module.") if wrapped else key).replace("_orig_mod.", "")
        out[ours.get(bare, bare)] = value
    return out


def _tied_keys(live: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return, for each key of a tensor that has several keys, the other keys of that tensor."""
    by_tensor: dict[int, list[str]] = {}
    for key, value in live.items():
        if isinstance(value, torch.Tensor):
            by_tensor.setdefault(id(value), []).append(key)
    return {key: [k for k in keys if k != key] for keys in by_tensor.values() if len(keys) > 1 for key in keys}


def _check(key: str, value: Any, live: Any, name: str) -> None:
    """Raise ``UserError`` if ``value``, from the file ``name``, cannot be copied into ``live``, the model's value of the same
    ``key``."""
    if not isinstance(value, torch.Tensor) or not isinstance(live, torch.Tensor):
        raise _import_error(
            "import-mismatch", f"{key} of {name} is a {type(value).__name__}, in the model a {type(live).__name__}"
        )
    if value.shape != live.shape or value.is_complex() is not live.is_complex():
        have, want = (f"{t.dtype} {list(t.shape)}" for t in (value, live))
        raise _import_error("import-mismatch", f"{key} is {have} in {name}, in the model {want}")


def report(imported: Imported, rank: int, optimizers: Mapping[str, Optimizer], others: Iterable[str], *, stateful_hook: bool
           ) -> list[ComponentReport]:  # fmt: skip
    """Load the imported optimizer's state, if any, into the optimizer named ``optimizer``. Return reports that say which
    components were imported. Raises ``UserError`` if there is no such optimizer, or the state does not fit."""

    def of(component: str, reason: str, *, taken: bool = False) -> ComponentReport:
        status: Any = "imported" if taken else "absent"
        return ComponentReport(component=component, rank=rank, status=status, reason=reason)

    out = [of("model", imported.model, taken=True)]
    not_read = "nothing of it was read from the file; it keeps its initial state"
    for component, optimizer in optimizers.items():
        taken = component == "optimizer" and imported.optimizer is not None
        if taken:
            _load_optimizer(optimizer, imported)
        out.append(of(component, f"from {imported.source}" if taken else not_read, taken=taken))
    if imported.optimizer is not None and "optimizer" not in optimizers:
        raise _import_error(
            "import-mismatch", "start_from.optimizer is true, but no optimizer is registered under that name"
        )
    out += [of(component, not_read) for component in others]
    if imported.has_hook or stateful_hook:
        has = (
            "the file's comm_hook_state belongs to one rank of another DDP and its buckets; "
            if imported.has_hook
            else ""
        )
        out.append(of("hook", f"{has}the hook keeps its initial state"))
    return out


def _load_optimizer(optimizer: Optimizer, imported: Imported) -> None:
    """Load the imported state into ``optimizer``. Raises ``UserError`` if the optimizer refuses the state. Also raises it if, for
    example, a momentum has another shape than its parameter."""
    try:
        optimizer.load_state_dict(dict(imported.optimizer))
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise _import_error(
            "import-mismatch", f"the optimizer cannot load the state in {imported.source}: {error}"
        ) from error
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if key in _PARAMETER_SHAPED and isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                text = f"is {list(value.shape)}, its parameter {list(parameter.shape)}: it is of another model"
                raise _import_error("import-mismatch", f"{key} of the optimizer in {imported.source} {text}")


def _format_names(names: Iterable[str]) -> str:
    """Return the names as text, quoted and sorted: the first three, and the number of the others."""
    return join_first([repr(name) for name in sorted(names)], _MAX_NAMES)


def _first_line(error: Exception) -> str:
    """Return the first line of the error's message, at most 300 characters; its type's name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _import_error(code: str, text: str) -> UserError:
    return UserError(text, code=code)
