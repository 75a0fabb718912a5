"""A Session that measures what its saves cost its loop, and then, in the same process, a plain copy and ``torch.save`` of the
same tensors. Killed after that, its next attempt measures the load, beside ``torch.load``.

Writes ``saves.json`` and ``load.json`` into ``--folder``; seconds, from step end to step end with the device idle at each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ratchet_contract import env_vars
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_worker.session.session import Session

_LAYERS = 24


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, required=True, help="of parameters and AdamW's two averages")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="the spec's checkpoint.every_steps")
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    with Session() as session:
        torch.manual_seed(0)
        width = math.isqrt(args.megabytes * 10**6 // (12 * _LAYERS))
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(_LAYERS)]
        model = session.wrap(nn.Sequential(*layers))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        session.register(optimizer=optimizer)
        wait(session.device)
        begin = time.perf_counter()
        session.restore(args.every * (args.saves + 3))
        wait(session.device)
        if session.resumed:
            write(
                args.folder / "load.json", loaded(session, model, optimizer, time.perf_counter() - begin, args.folder)
            )
        batch = torch.randn(args.batch, width, device=session.device)
        last_save, ends, manifests = args.every * args.saves, [0.0], {}
        for step in session.steps(args.every * (args.saves + 3)):
            if not session.resumed:
                ends.append(time.perf_counter())  # of step number ``step``, its boundary included
                if step == last_save + 2:
                    manifests[last_save] = saved_at(session, last_save)
                    result = measured(session, ends, manifests, args.every)
                    result |= plain(session, model, optimizer, args.folder)
                    write(args.folder / "saves.json", result)
                    time.sleep(3600)  # until it is killed
                elif step > args.every and step % args.every == args.every - 1:
                    manifests[step + 1 - args.every] = saved_at(session, step + 1 - args.every)
                    ends[-1] = time.perf_counter()
            nn.functional.mse_loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            wait(session.device)
            if step + 1 == last_save:
                began = time.perf_counter()
                write(args.folder / "digest.json", {"step": last_save, "digest": digest(model, optimizer)})
                ends[-1] += time.perf_counter() - began  # no part of the save


def saved_at(session: Session, step: int) -> float:
    """Unix time at which the checkpoint of ``step`` was committed; waits for that."""
    launch = LaunchFile.model_validate_json(Path(os.environ[env_vars.LAUNCH_FILE]).read_bytes())
    manifest = JobPaths(Path(launch.job_root)).checkpoint(step, launch.attempt) / MANIFEST_NAME
    while not manifest.exists():
        time.sleep(0.001)
    return manifest.stat().st_ctime - (time.time() - time.perf_counter())


def measured(session: Session, ends: list[float], manifests: dict[int, float], every: int) -> dict[str, Any]:
    """``ends[n + 1]``: when the boundary behind ``n`` steps was over. A save costs the boundary at which it is due, and the step
    behind it, which may wait for the copy before the parameters change."""
    took = [later - earlier for earlier, later in pairwise(ends[1:])]  # took[n]: of step n with its boundary
    quiet = took[max(3, every // 2) : every - 1]  # before the first save
    usual = statistics.median(quiet)
    stalls = [took[step - 1] + took[step] - 2 * usual for step in manifests]
    durable = [at - ends[step + 1] for step, at in manifests.items()]
    staging = session._runtime.checkpointer._staging  # nowhere else is it told whether the memory is pinned
    return {
        "usual": usual, "slowest": max(quiet), "first": stalls[0], "others": stalls[1:], "durable": durable,
        "pinned": staging._staging_buffer._buffer.is_pinned() if session.device.type == "cuda" else False,
    }  # fmt: skip


def plain(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
    """The named alternatives, each the second of two: a copy of all tensors into memory that is there (pinned on a GPU), and
    ``torch.save`` of both states, which does not sync."""
    tensors = list(all_tensors(model, optimizer))
    room = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=session.device.type == "cuda") for t in tensors]
    file = folder / "plain.pt"
    for _ in range(2):
        begin = time.perf_counter()
        for into, tensor in zip(room, tensors, strict=True):
            into.copy_(tensor, non_blocking=True)
        wait(session.device)
        copied = time.perf_counter()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved = time.perf_counter()
    return {"bytes": sum(t.nbytes for t in tensors), "copy": copied - begin, "torch.save": saved - copied}


def loaded(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, seconds: float, folder: Path
) -> dict[str, Any]:
    expected = json.loads((folder / "digest.json").read_text())
    same = expected == {"step": session.step, "digest": digest(model, optimizer)}
    begin = time.perf_counter()
    state = torch.load(folder / "plain.pt", map_location=session.device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    wait(session.device)
    return {"restore": seconds, "torch.load": time.perf_counter() - begin, "same": same, "step": session.step}


def all_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    yield from model.state_dict().values()
    for state in optimizer.state_dict()["state"].values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for tensor in all_tensors(model, optimizer):
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return found.hexdigest()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write(path: Path, result: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(result))
    temporary.rename(path)


if __name__ == "__main__":
    main()
