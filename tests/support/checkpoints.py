"""Real, small checkpoints on disk for tests of the store."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratchet_contract.checkpoint.manifest import HOOK_SUMMARY, FileEntry, HookRecord, Manifest, TensorEntry
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.paths import checkpoint_dir_name
from ratchet_store.format.shard_slices import plan_slices
from tests.support.one_shot_writers import Given, commit, write_rank_file

JOB = "job-1"
SHAPES: dict[str, tuple[str, tuple[int, ...], int]] = {
    "shared/model/weight": ("F32", (31, 17), 4),
    "shared/model/half": ("BF16", (5,), 2),
    "shared/model/none": ("F32", (0, 4), 4),
    "shared/optimizer/step": ("I64", (), 8),
}


def shared_bytes(seed: int, scale: int = 1) -> dict[str, bytes]:
    """The bytes of every shared tensor; ``scale`` multiplies the first one's rows."""
    source = random.Random(seed)
    return {name: source.randbytes(_numel(name, scale) * SHAPES[name][2]) for name in SHAPES}


def _shape(name: str, scale: int) -> tuple[int, ...]:
    shape = SHAPES[name][1]
    return (shape[0] * scale, *shape[1:]) if name == "shared/model/weight" else shape


def _numel(name: str, scale: int) -> int:
    numel = 1
    for size in _shape(name, scale):
        numel *= size
    return numel


def write_ranks(
    directory: Path, *, world_size: int = 2, seed: int = 0, scale: int = 1, state: Any = None, private: int = 24
) -> tuple[list[FileEntry], list[TensorEntry]]:
    """The rank files of one checkpoint, not committed. ``private``: bytes of each rank's own tensor."""
    shared = shared_bytes(seed, scale)
    plan = plan_slices([(name, _numel(name, scale), SHAPES[name][2]) for name in SHAPES], world_size)
    files: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    for rank in range(world_size):
        pieces = [
            Given(name, SHAPES[name][0], _shape(name, scale), start, memoryview(shared[name])[start * k : stop * k])
            for name, start, stop in plan[rank]
            for k in [SHAPES[name][2]]
        ]
        own = random.Random(f"{seed}/{rank}").randbytes(private)
        pieces.append(Given(f"rank/{rank}/rng/torch", "U8", (private,), 0, own))
        file, entries = write_rank_file(directory, rank, world_size, pieces, state or {"rank": rank, "seed": seed})
        files.append(file)
        tensors += entries
    return files, tensors


def manifest_of(
    step: int,
    attempt: int,
    files: Sequence[FileEntry],
    tensors: Sequence[TensorEntry],
    *,
    parent: Base | None = None,
    job_id: str = JOB,
    hook: dict[str, Any] | None = None,
) -> Manifest:
    """``hook``: its spec, as a job's spec has it."""
    hook = hook or {"name": "allreduce"}
    return Manifest(
        job_id=job_id, step=step, attempt=attempt, parent=parent or Base(), world_size=len(files), created="2026-01-01T00:00:00Z",
        reason="schedule", spec_digest="0" * 64, replicas="equal",
        hook=HookRecord(name=hook["name"], parameters=hook, state_version=1), files=list(files), tensors=list(tensors),
    )  # fmt: skip


def make_checkpoint(
    checkpoints: Path,
    step: int,
    attempt: int = 1,
    *,
    parent: Base | None = None,
    world_size: int = 2,
    seed: int | None = None,
    scale: int = 1,
    job_id: str = JOB,
    state: Any = None,
    hook: dict[str, Any] | None = None,
    summaries: Sequence[dict[str, Any]] = (),
    private: int = 24,
    reason: str = "schedule",
    code_digest: str | None = None,
) -> Manifest:
    """A committed checkpoint; its bytes are a function of the seed (default: step and attempt)."""
    directory = checkpoints / checkpoint_dir_name(step, attempt)
    seed = step * 1000 + attempt if seed is None else seed
    files, tensors = write_ranks(directory, world_size=world_size, seed=seed, scale=scale, state=state, private=private)
    manifest = manifest_of(step, attempt, files, tensors, parent=parent, job_id=job_id, hook=hook)
    told = [HOOK_SUMMARY.validate_python(summary) for summary in summaries]
    return commit(
        directory, manifest.model_copy(update={"hook_summaries": told, "reason": reason, "code_digest": code_digest})
    )


def make_chain(checkpoints: Path, *steps: int, attempt: int = 1, parent: Base | None = None) -> list[Manifest]:
    """Checkpoints of one attempt, each the parent of the next."""
    chain: list[Manifest] = []
    for step in steps:
        chain.append(make_checkpoint(checkpoints, step, attempt, parent=chain[-1].base if chain else parent))
    return chain


def copy_checkpoint(source: Path, target: Path) -> Path:
    """A copy of a committed checkpoint's directory, whatever is there now removed."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


def list_names(directory: Path) -> list[str]:
    """What a directory holds, sorted."""
    return sorted(path.name for path in directory.iterdir())
