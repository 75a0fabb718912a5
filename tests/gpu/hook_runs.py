"""What the ranks of ``hooks_killed`` do: a run that nobody disturbs, one that saves and trains on until it is killed, and one
that goes on from that save in a new process. Their states lie in files of ``folder``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from ratchet_worker.host import determinism
from tests.support.exact_matrix import TOTAL, Row
from tests.support.exact_runs import Run, Saved, differences


@dataclass
class Whole:
    """Of an undisturbed run. ``finite``: no weight became inf or NaN, which would make any two runs alike; ``moved``: training
    changed weights; ``tensors``: how many of this rank's will be compared."""

    finite: bool
    moved: bool
    tensors: int


def undisturbed(rank: int, row: Row, device: str, folder: str) -> Whole:
    run = Run(rank, dist.get_world_size(), row, device=_prepared(device))
    first = [p.detach().clone() for p in run.net.parameters()]
    run.train(TOTAL)
    saved = run.save()
    _write(saved, Path(folder, f"undisturbed-{rank}"))
    finite = all(bool(p.isfinite().all()) for p in run.net.parameters())
    moved = any(not torch.equal(a, b) for a, b in zip(first, run.net.parameters(), strict=True))
    return Whole(finite, moved, len(saved.shared) + len(saved.private))


def until_killed(rank: int, row: Row, device: str, folder: str, save_at: int) -> None:
    """Save after step ``save_at`` and train on without end; the file ``beyond-RANK`` appears one step behind the save."""
    run = Run(rank, dist.get_world_size(), row, device=_prepared(device))
    run.train(save_at)
    _write(run.save(), Path(folder, f"saved-{rank}"))
    for step in count(save_at + 1):
        run.train(step)
        Path(folder, f"beyond-{rank}").touch()


def resumed(rank: int, row: Row, device: str, folder: str) -> list[str]:
    """Names of all that differs at the end between the undisturbed run and one that goes on from the killed one's save."""
    run = Run(rank, dist.get_world_size(), row, _read(Path(folder, f"saved-{rank}")), _prepared(device))
    run.train(TOTAL)
    ours = Path(folder, f"resumed-{rank}")
    _write(run.save(), ours)
    return differences(_read(Path(folder, f"undisturbed-{rank}")), _read(ours))


def _prepared(device: str) -> torch.device:
    """All ranks share the first GPU. Settings as the worker has them under ``determinism: strict``."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    determinism.apply("strict", 1)
    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def _write(saved: Saved, file: Path) -> None:
    tensors = {f"shared/{name}": tensor.cpu() for name, tensor in saved.shared.items()}
    tensors |= {f"private/{name}": tensor.cpu() for name, tensor in saved.private.items()}
    facts = {"step": saved.step, "state": saved.state, "layout": saved.layout}
    save_file(tensors, file, {"facts": json.dumps(facts)})


def _read(file: Path) -> Saved:
    with safe_open(file, "pt") as data:
        facts = json.loads(data.metadata()["facts"])
        found: dict[str, dict[str, torch.Tensor]] = {"shared": {}, "private": {}}
        for key in data.keys():  # noqa: SIM118
            part, _, name = key.partition("/")
            found[part][name] = data.get_tensor(key)
    return Saved(facts["step"], found["shared"], found["private"], facts["state"], facts["layout"])
