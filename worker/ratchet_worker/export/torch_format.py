"""Converts a checkpoint to plain PyTorch: the model under its ``state_dict`` keys, and the state of one rank."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from ratchet_contract.checkpoint.manifest import RANK_PREFIX, SHARED_PREFIX, Manifest, TensorEntry
from ratchet_contract.errors import StateError
from ratchet_contract.plural import pluralize
from ratchet_contract.version import RATCHET_VERSION
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.manage.to_torch import plain_state
from ratchet_store.read.checkpoint_reader import load
from ratchet_worker.resume import read_checkpoint as disk
from ratchet_worker.resume.read_checkpoint import Chosen
from ratchet_worker.state import model as model_state
from ratchet_worker.state import optimizer
from ratchet_worker.state.average_replicas import mean
from ratchet_worker.state.snapshot import Snapshot, Tensors, byte_view, empty

FORMAT: Final = 1
_BUILT_IN_COMPONENTS: Final = frozenset({"model", "buffers", "modules", "facts", "hook", "rng", model_state.COMPONENT})


@dataclass
class Model:
    """A model to export. ``tensors``: each tensor once, by its first ``state_dict`` key. ``tied``: further keys of a tensor ->
    its key in ``tensors``."""

    tensors: Tensors
    tied: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def metadata(self, manifest: Manifest) -> dict[str, str]:
        """Return the metadata of a safetensors file: the tied keys, ``format``, and the origin and notes as JSON."""
        facts = {**origin(manifest), "notes": self.notes}
        return {**self.tied, "format": "pt", "ratchet": json.dumps(facts)}


def origin(manifest: Manifest) -> dict[str, Any]:
    """Return the origin of an exported file by name, such as its job, checkpoint, step and number of ranks."""
    return {
        "ratchet_version": RATCHET_VERSION,
        "job": manifest.job_id,
        "checkpoint": manifest.id,
        "checkpoint_digest": manifest.digest,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "hook": manifest.hook.name,
    }


def read_model(chosen: Chosen) -> Model:
    """Return the parameters and buffers in the model's ``state_dict``; buffers are rank 0's. If the hook lets replicas differ,
    parameters are averaged where possible. Raises ``CheckpointError``, ``StateError``."""
    manifest = chosen.manifest
    assert manifest is not None
    stored, state = _read_model(chosen)
    notes = []
    if manifest.replicas != "equal":
        ranks = range(manifest.world_size)
        found = mean((disk.read(chosen, [r], {"model"}.__contains__, shared=False)[r] for r in ranks), {"model"})
        stored |= found.tensors
        notes.append(f"parameters are the mean over {pluralize(manifest.world_size, 'rank')}, whose replicas differ")
        if found.from_rank_0:
            notes.append(f"from rank 0, since it has no mean: {', '.join(found.from_rank_0[:5])}")
    elif state.get("model"):
        notes.append(f"DDP does not average these, they are rank 0's: {', '.join(state['model'][:5])}")
    if manifest.world_size > 1 and any(name.startswith("buffers/") for name in stored):
        notes.append("buffers are rank 0's")
    keys = state_dict_keys(stored, state, notes)
    model = Model({}, notes=notes)
    first: dict[str, str] = {}
    for key, name in keys:
        if name is None or name not in stored:
            continue
        if name in first:
            model.tied[key] = first[name]
        else:
            first[name] = key
            model.tensors[key] = stored[name]
    if lost := [key for key, name in keys if name is None]:
        notes.append(f"left out, being neither parameter nor buffer: {', '.join(lost[:5])}")
    return model


def read_rank(chosen: Chosen, rank: int) -> dict[str, Any]:
    """Return one rank's state, such as model and optimizers, as a dict for ``torch.save``. Raises ``CheckpointError``,
    ``StateError``."""
    manifest = chosen.manifest
    assert manifest is not None
    saved = disk.read(chosen, [rank])[rank]
    tensors = {**saved.shared, **saved.private}
    modules = saved.value("modules")
    notes: list[str] = []
    state_dict: OrderedDict[str, Any] = OrderedDict()
    for key, name in state_dict_keys(tensors, saved.state, notes):
        module, _, last = key.rpartition(".")
        if name is not None:
            state_dict[key] = tensors[name]
        elif last == "_extra_state" and module in modules["extra"]:
            state_dict[key] = to_plain(modules["extra"][module], key)
        else:
            notes.append(f"{key} is neither parameter nor buffer, and left out")
    components = _components(saved, tensors)
    hook_state, beside = _hook_state(manifest, saved, tensors)
    return {
        "format": FORMAT,
        **origin(manifest),
        "rank": rank,
        "state_dict": state_dict,
        "optimizer": components.pop("optimizer", None),
        "comm_hook": manifest.hook.name,
        "comm_hook_parameters": manifest.hook.parameters,
        "comm_hook_state": to_plain(hook_state, "comm_hook_state"),
        **to_plain(beside, "hook"),
        "bucket_layout": manifest.bucket_layout,
        "rng": to_plain(saved.value("rng"), "rng"),
        "components": components,
        "notes": notes,
    }


def to_plain(value: Any, path: str) -> Any:
    """Return ``value``, a decoded state, converted to types that ``torch.load(weights_only=True)`` accepts. Raises
    ``StateError``, naming ``path``, if that is impossible."""
    if isinstance(value, np.random.RandomState):
        return to_plain(value.get_state(legacy=False), path)
    if isinstance(value, np.random.Generator):
        return to_plain(value.bit_generator.state, path)
    if isinstance(value, np.ndarray | np.generic):
        return _plain_array(value, path)
    if isinstance(value, dict):
        pairs = ((key, to_plain(item, f"{path}[{key!r}]")) for key, item in value.items())
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
    if isinstance(value, set | frozenset):
        return [to_plain(item, path) for item in sorted(value, key=repr)]
    if type(value) in (list, tuple, deque):
        items = [to_plain(item, f"{path}[{n}]") for n, item in enumerate(value)]
        return tuple(items) if type(value) is tuple else items
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.Size | torch.Tensor):
        return value
    raise StateError(
        f"{path}: a {type(value).__qualname__} cannot be exported: torch.load(weights_only=True) refuses it"
    )


def _plain_array(value: np.ndarray[Any, Any] | np.generic, path: str) -> Any:
    """Convert a numpy array or scalar as ``to_plain`` does. Raises ``StateError`` for numbers that torch does not have."""
    array = np.asarray(value).astype(value.dtype.newbyteorder("="), order="C")
    if array.dtype.kind in "mM":
        return {"dtype": str(array.dtype), "integers": _plain_array(array.astype(np.int64), path)}
    if array.dtype.char in "gG":
        raise StateError(
            f"{path}: numpy's {array.dtype} cannot be exported: torch has no such type. Keep it as float64"
        )
    listed = array.dtype.kind in "US" or (array.dtype.kind in "ui" and array.ndim <= 1)
    if listed or isinstance(value, np.generic):
        return array.tolist()
    return torch.from_numpy(array)


def _read_model(chosen: Chosen) -> tuple[Tensors, dict[str, Any]]:
    """Return the shared parameters, and rank 0's own parameters and buffers, by name; and rank 0's state as JSON values."""
    manifest, directory = chosen.manifest, chosen.directory
    assert manifest is not None and directory is not None
    own = f"{RANK_PREFIX}0/"
    stored: Tensors = {}

    def name_of(entry: TensorEntry) -> str:
        return entry.name.removeprefix(SHARED_PREFIX).removeprefix(own)

    def place(entry: TensorEntry) -> memoryview:
        tensor = stored.setdefault(name_of(entry), empty(entry.dtype, entry.shape))
        begin = entry.start * tensor.element_size()
        return byte_view(tensor)[begin : begin + entry.nbytes]

    wanted = (f"{SHARED_PREFIX}model/", f"{own}model/", f"{own}buffers/")
    state = load(directory, manifest, lambda entry: entry.name.startswith(wanted), place, ranks=(0,)).states[0]
    return stored, state


def state_dict_keys(stored: Tensors, state: dict[str, Any], notes: list[str]) -> list[tuple[str, str | None]]:
    """Return pairs (``state_dict`` key, tensor name) in the recorded order. The name is None for an entry that is neither a
    parameter nor a buffer. If no keys were recorded, the tensors' own names are the keys, and ``notes`` gets a note."""
    recorded = state.get(model_state.COMPONENT) or {"keys": None, "error": "none were recorded"}
    if recorded["keys"] is not None:
        return [(key, name) for key, name in recorded["keys"]]
    # No keys were recorded.
    notes.append(f"parameters and buffers have their own names, state_dict's keys are not known: {recorded['error']}")
    return [(name.partition("/")[2], name) for name in stored if name.startswith(("model/", "buffers/"))]


def _components(saved: Snapshot, tensors: Tensors) -> dict[str, Any]:
    """Return the state of one rank's optimizers and other registered objects, by component, in plain values (``to_plain``)."""
    replicas = {n.removeprefix("model/") for n in saved.private if n.startswith("model/")}
    out: dict[str, Any] = {}
    for component in set(saved.state) - _BUILT_IN_COMPONENTS:
        value = saved.value(component, exclude=replicas)
        if optimizer.is_captured(value):
            value = optimizer.as_state_dict(component, tensors, value)
        out[component] = to_plain(value, component)
    return out


def _hook_state(manifest: Manifest, saved: Snapshot, tensors: Tensors) -> tuple[Any, dict[str, Any]]:
    """Return the hook's state in torch's own form, and further values by key. A custom hook's state has the form that the user's
    code gives it; a hook without state gives None. Raises ``StateError`` if the state cannot be converted."""
    spec = disk.recorded_hook(manifest)
    if spec is None:
        raise StateError(f"hook {manifest.hook.name} is not known to this version of Ratchet")
    strides = (saved.state.get(model_state.COMPONENT) or {}).get("strides", {})
    parameters = {
        name.removeprefix("model/"): _meta_like(tensor, strides.get(name.removeprefix("model/")))
        for name, tensor in tensors.items()
        if name.startswith("model/")
    }
    try:
        return plain_state(spec, *saved.encoded("hook"), parameters)
    except HookStateError as error:
        raise StateError(f"the hook's state cannot be exported in torch's form: {error}") from error


def _meta_like(tensor: torch.Tensor, strides: list[int] | None) -> torch.Tensor:
    """Return a tensor on device ``meta`` with the shape and type of ``tensor`` and these ``strides``; None: contiguous."""
    shape, dtype = tensor.shape, tensor.dtype
    return torch.empty_strided(shape, strides or torch.empty(shape, device="meta").stride(), dtype=dtype, device="meta")


def open_checkpoint(directory: Path, manifest: Manifest) -> Chosen:
    """Return the checkpoint in ``directory`` as a ``Chosen``, for reading. Reads nothing yet."""
    return Chosen(manifest.base, manifest, directory)
