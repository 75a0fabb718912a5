"""From the disk to a rank: reading a checkpoint back, every byte verified, and what was recorded against what is now."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch.utils import deterministic

from ratchet_contract.manifest import RANK_PREFIX, SHARED_PREFIX, Manifest, TensorEntry
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import JobPaths
from ratchet_contract.resume import Base, EnvironmentDifference
from ratchet_contract.spec import JobSpec
from ratchet_hooks.changes import HookChange, change_of, hook_of
from ratchet_hooks.specs import HookSpec
from ratchet_store.read import load
from ratchet_worker.cores import own_cores
from ratchet_worker.environment_record import PACKAGES, Record, compare, facts_of, name_packages
from ratchet_worker.snapshot import Snapshot, byte_view, empty


@dataclass(frozen=True)
class Chosen:
    """What this attempt starts from; ``manifest`` None: from scratch. The same on every rank, but for ``held``: what this rank
    has read of it already."""

    base: Base = field(default_factory=Base)
    manifest: Manifest | None = None
    directory: Path | None = None
    quarantined: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    held: list[Snapshot] = field(default_factory=list)

    def take(self) -> Snapshot:
        """What this rank has read; whoever takes it is the only one to hold it. Once."""
        return self.held.pop()


def read(
    chosen: Chosen,
    ranks: Collection[int],
    wanted: Callable[[str], bool] = lambda component: True,
    *,
    shared: bool = True,
    whole: Collection[int] = (),
) -> dict[int, Snapshot]:
    """Snapshots of ``ranks`` as they were saved; ``wanted`` picks private components by name. The shared tensors, if asked
    for, are in every snapshot returned. ``whole``: ranks of whose files every byte is verified, also what is not wanted. Raises
    ``CheckpointError``."""
    manifest, directory = chosen.manifest, chosen.directory
    assert manifest is not None and directory is not None
    tensors: dict[str, torch.Tensor] = {}

    def takes(entry: TensorEntry) -> bool:
        if entry.name.startswith(SHARED_PREFIX):
            return shared
        rank, _, rest = entry.name.removeprefix(RANK_PREFIX).partition("/")
        return int(rank) in ranks and wanted(rest.partition("/")[0])

    def place(entry: TensorEntry) -> memoryview:
        if entry.name not in tensors:
            tensors[entry.name] = empty(entry.dtype, entry.shape)
        tensor = tensors[entry.name]
        begin = entry.start * tensor.element_size()
        return byte_view(tensor)[begin : begin + entry.nbytes]

    with _unfilled():
        loaded = load(directory, manifest, takes, place, ranks=ranks, whole=whole, threads=own_cores())
    return {rank: _snapshot(rank, tensors, loaded.states[rank]) for rank in ranks}


@contextmanager
def _unfilled() -> Iterator[None]:
    """New tensors are left as they are, which deterministic algorithms fill: all of these are read into, or never seen."""
    settings: Any = deterministic  # its attributes are made as it is imported
    before = settings.fill_uninitialized_memory
    if before and torch.are_deterministic_algorithms_enabled():
        settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


def _snapshot(rank: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> Snapshot:
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
    """Everything recorded that is not the same now: the environment, the spec, and digests of code and data.

    ``directory``: the checkpoint's. ``own``: what this very rank had recorded (its GPU, the digest of its share of the data);
    else rank 0's facts stand for it. A spec in which only the number of ranks is another one is the same: ``world_size`` and
    ``ranks_per_node`` tell of it. ``packages``: of this process; of a checkpoint of a Ratchet that recorded none nothing is said
    of them."""
    recorded = {
        **(own if own is not None else {**facts_of(manifest.environment), "data_digest": manifest.data_digest}),
        "code_digest": manifest.code_digest,
    }
    now: Record = {
        **current,
        "code_digest": launch.resolved.code_digest,
        "data_digest": data_digest,
    }
    if PACKAGES not in recorded:
        del now[PACKAGES]
    found = name_packages(compare(recorded, now), manifest.environment, packages)
    return sorted([*found, *_of_the_spec(manifest, directory, launch)], key=lambda difference: difference.key)


def same_but_for_the_ranks(manifest: Manifest, launch: LaunchFile, *, any_hook: bool = False) -> bool:
    """Was the checkpoint made under this very spec, the number of ranks (and with ``any_hook`` the hook) left aside?"""
    hook = recorded_hook(manifest) if any_hook else None
    return _with_its_ranks(manifest, launch, {"hook": hook} if hook else {}).digest() == manifest.spec_digest


def _with_its_ranks(manifest: Manifest, launch: LaunchFile, then: Mapping[str, Any]) -> JobSpec:
    """This attempt's spec with the number of ranks that the checkpoint has, and ``then``."""
    world = launch.spec.world
    ranks = {"world": world.model_copy(update={"ranks_per_node": manifest.world_size // world.nodes})}
    return launch.spec.model_copy(update={**ranks, **then})


def _of_the_spec(manifest: Manifest, directory: Path, launch: LaunchFile) -> list[EnvironmentDifference]:
    """The fields of the spec that the attempt which saved the checkpoint had otherwise; where its launch file is not beside the
    checkpoint, the two digests. Values of ``env`` may be secrets and are not shown."""
    now = _with_its_ranks(manifest, launch, {})
    if now.digest() == manifest.spec_digest:
        return []
    try:
        file = JobPaths(directory.parents[1]).attempt(manifest.epoch).launch_file
        then = LaunchFile.model_validate_json(file.read_bytes()).spec
    except (OSError, ValidationError):
        then = None
    digests = EnvironmentDifference(key="spec_digest", recorded=manifest.spec_digest, current=now.digest())
    if then is None or then.digest() != manifest.spec_digest:
        return [digests]
    there, here = _fields(then.canonical()), _fields(now.canonical())
    found = []
    for key in sorted({*there, *here}):
        before, after = there.get(key), here.get(key)
        if repr(before) != repr(after):  # == takes 1, 1.0 and True for one
            before, after = ("a value", "another") if key.startswith("env.") else (before, after)
            found.append(EnvironmentDifference(key=f"spec:{key}", recorded=before, current=after))
    return found or [digests]


def _fields(part: Mapping[str, Any], prefix: str = "") -> Record:
    """The fields of a spec, nested ones with their dots; lists as JSON."""
    found: Record = {}
    for key, value in part.items():
        if isinstance(value, dict) and value:
            found |= _fields(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str | int | float | None) else json.dumps(value)
    return found


def recorded_hook(manifest: Manifest) -> HookSpec | None:
    """The hook that made the checkpoint; None: a later version, or none that is known here."""
    return hook_of({**manifest.hook.parameters, "name": manifest.hook.name})


def hook_change(manifest: Manifest, launch: LaunchFile) -> HookChange | None:
    """From the hook that made the checkpoint to the one that the spec asks for; None: it is the same."""
    return change_of(manifest.hook.name, manifest.hook.parameters, launch.spec.hook)
