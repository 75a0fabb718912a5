"""What the ranks of ``hooks_killed`` do: a run that nobody disturbs, one that saves and trains on until it is killed, and one
that continues from that save in a new process. Their states are files below ``folder``."""

from __future__ import annotations

import os
from dataclasses import asdict
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from ratchet_hooks.state.files import save_state
from ratchet_worker.host import determinism
from tests.support.exact_matrix import TOTAL, Row
from tests.support.exact_runs import Result, Run, resume_and_compare, run_undisturbed, state_file


def undisturbed(rank: int, row: Row, device: str, folder: str) -> None:
    run_undisturbed(rank, dist.get_world_size(), row, TOTAL, f"{folder}/undisturbed", _prepare(device))


def until_killed(rank: int, row: Row, device: str, folder: str, save_at: int) -> None:
    """Save after step ``save_at`` and train on without end; the file ``beyond-RANK`` appears one step after the save."""
    run = Run(rank, dist.get_world_size(), row, device=_prepare(device))
    run.train(save_at)
    save_state(state_file(f"{folder}/saved", rank), asdict(run.save()))
    for step in count(save_at + 1):
        run.train(step)
        Path(folder, f"beyond-{rank}").touch()


def resumed(rank: int, row: Row, device: str, folder: str) -> Result:
    """What differs at the end between the undisturbed run and one that continues from the killed one's save."""
    source, whole = f"{folder}/saved", f"{folder}/undisturbed"
    return resume_and_compare(rank, dist.get_world_size(), row, source, whole, [], TOTAL, device=_prepare(device))


def _prepare(device: str) -> torch.device:
    """All ranks share the first GPU. Settings as the worker has them under ``determinism: strict``."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    determinism.apply("strict", 1)
    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)
