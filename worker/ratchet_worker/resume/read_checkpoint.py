"""Reads a checkpoint, or parts of it, back, and compares what it recorded with the current environment and spec."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ratchet_contract.checkpoint.manifest import RANK_PREFIX, SHARED_PREFIX, Manifest, TensorEntry
from ratchet_contract.checkpoint.resume_report import Base, EnvironmentDifference
from ratchet_contract.paths import JobPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec
from ratchet_hooks.specs.compatibility import HookChange, hook_change, recorded_spec
from ratchet_hooks.specs.hook_specs import HookSpec
from ratchet_store.read.checkpoint_reader import load
from ratchet_worker.host.cpu import rank_cores
from ratchet_worker.state.environment import PACKAGES, Record, compare, compared_facts, expand_package_difference
from ratchet_worker.state.snapshot import Snapshot, byte_view, empty


@dataclass(frozen=True)
class Chosen:
    """The checkpoint that this attempt starts from. ``manifest``: None if the attempt starts without a checkpoint. ``loaded``:
    the state that this rank has read already. The other fields, except perhaps ``notes``, are equal on all ranks."""

    base: Base = field(default_factory=Base)
    manifest: Manifest | None = None
    directory: Path | None = None
    quarantined: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    loaded: list[Snapshot] = field(default_factory=list)

    def take(self) -> Snapshot:
        """Return the state that this rank has read, and drop the reference to it in ``loaded``. Call it only once."""
        # Only the caller then holds the state.
        return self.loaded.pop()


def read(
    chosen: Chosen,
    ranks: Collection[int],
    select: Callable[[str], bool] = lambda component: True,
    *,
    shared: bool = True,
    verified_ranks: Collection[int] = (),
) -> dict[int, Snapshot]:
    """Return, by rank, the states that ``ranks`` saved. ``select(component)``: True if that component's private tensors are to be
    read. ``shared``: True to read the shared tensors too. ``verified_ranks``: ranks whose files are verified completely; of other
    files, only what is read is verified. Raises ``CheckpointError``."""
    manifest, directory = chosen.manifest, chosen.directory
    assert manifest is not None and directory is not None
    tensors: dict[str, torch.Tensor] = {}

    def takes(entry: TensorEntry) -> bool:
        """True if the tensor of ``entry`` is to be returned."""
        if entry.name.startswith(SHARED_PREFIX):
            return shared
        rank, _, rest = entry.name.removeprefix(RANK_PREFIX).partition("/")
        return int(rank) in ranks and select(rest.partition("/")[0])

    def place(entry: TensorEntry) -> memoryview:
        """Return the memory into which the elements of ``entry``, a piece of a tensor, are read."""
        if entry.name not in tensors:
            tensors[entry.name] = empty(entry.dtype, entry.shape)
        tensor = tensors[entry.name]
        begin = entry.start * tensor.element_size()
        return byte_view(tensor)[begin : begin + entry.nbytes]

    loaded = load(directory, manifest, takes, place, ranks=ranks, complete_ranks=verified_ranks, threads=rank_cores())
    return {rank: _snapshot(rank, tensors, loaded.states[rank]) for rank in ranks}


def _snapshot(rank: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> Snapshot:
    """Return the snapshot of ``rank``. ``tensors``: all that were read, by stored name; ``state``: the rank's JSON."""
    prefix = f"{RANK_PREFIX}{rank}/"
    return Snapshot(
        shared={n.removeprefix(SHARED_PREFIX): t for n, t in tensors.items() if n.startswith(SHARED_PREFIX)},
        private={n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)},
        state=state,
    )


def differences(
    manifest: Manifest,
    directory: Path,
    current: Record,
    packages: Sequence[str],
    launch: LaunchFile,
    data_digest: str | None,
    own: Record | None = None,
) -> list[EnvironmentDifference]:
    """Return the differences in environment, code, data and spec between the checkpoint and now, sorted by key. ``own``: this
    rank's own record in the checkpoint. If it is None, rank 0's record in the manifest is compared."""
    recorded = {
        **(own if own is not None else {**compared_facts(manifest.environment), "data_digest": manifest.data_digest}),
        "code_digest": manifest.code_digest,
    }
    now: Record = {
        **current,
        "code_digest": launch.resolved.code_digest,
        "data_digest": data_digest,
    }
    if PACKAGES not in recorded:
        del now[PACKAGES]
    found = expand_package_difference(compare(recorded, now), manifest.environment, packages)
    return sorted([*found, *_spec_differences(manifest, directory, launch)], key=lambda difference: difference.key)


def is_same_spec_ignoring_ranks(manifest: Manifest, launch: LaunchFile, *, any_hook: bool = False) -> bool:
    """True if the spec of ``launch`` has the checkpoint's spec digest when ``ranks_per_node`` is ignored. ``any_hook``: also
    ignore the hook, if this version accepts the checkpoint's hook."""
    hook = recorded_hook(manifest) if any_hook else None
    return _spec_with_recorded_ranks(manifest, launch, {"hook": hook} if hook else {}).digest() == manifest.spec_digest


def _spec_with_recorded_ranks(manifest: Manifest, launch: LaunchFile, updates: Mapping[str, Any]) -> JobSpec:
    """Return a copy of this attempt's spec, with ``updates``. Its ``ranks_per_node`` is the checkpoint's number of ranks,
    divided by this attempt's nodes and rounded down."""
    world = launch.spec.world
    ranks = {"world": world.model_copy(update={"ranks_per_node": manifest.world_size // world.nodes})}
    return launch.spec.model_copy(update={**ranks, **updates})


def _spec_differences(manifest: Manifest, directory: Path, launch: LaunchFile) -> list[EnvironmentDifference]:
    """Return the differences between the specs of the checkpoint and of this attempt, without ``ranks_per_node``. Mostly there is
    one difference for each field that differs. If the fields of the checkpoint's spec are not known, the result is only the
    difference of the digests."""
    now = _spec_with_recorded_ranks(manifest, launch, {})
    if now.digest() == manifest.spec_digest:
        return []
    try:
        file = JobPaths(directory.parents[1]).attempt(manifest.attempt).launch_file
        then = LaunchFile.model_validate_json(file.read_bytes()).spec
    except (OSError, ValidationError):
        then = None
    digests = EnvironmentDifference(key="spec_digest", recorded=manifest.spec_digest, current=now.digest())
    if then is None or then.digest() != manifest.spec_digest:
        return [digests]
    there, here = _flatten(then.canonical()), _flatten(now.canonical())
    found = []
    for key in sorted({*there, *here}):
        before, after = there.get(key), here.get(key)
        if repr(before) != repr(after):  # == treats 1, 1.0 and True as equal
            # Values of env may be secrets.
            before, after = ("a value", "another") if key.startswith("env.") else (before, after)
            found.append(EnvironmentDifference(key=f"spec:{key}", recorded=before, current=after))
    return found or [digests]


def _flatten(part: Mapping[str, Any], prefix: str = "") -> Record:
    """Return the fields of a spec by name. Nested fields have dotted names, which begin with ``prefix``."""
    found: Record = {}
    for key, value in part.items():
        if isinstance(value, dict) and value:
            found |= _flatten(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str | int | float | None) else json.dumps(value)
    return found


def recorded_hook(manifest: Manifest) -> HookSpec | None:
    """Return the spec of the hook that made the checkpoint; None if this version does not accept it."""
    return recorded_spec({**manifest.hook.parameters, "name": manifest.hook.name})


def recorded_hook_change(manifest: Manifest, launch: LaunchFile) -> HookChange | None:
    """Return the change from the checkpoint's hook to that of this attempt's spec; None if nothing has changed that can change a
    bit."""
    return hook_change(manifest.hook.name, manifest.hook.parameters, launch.spec.hook)
