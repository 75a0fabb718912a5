"""One rank of ``make bench ONLY=paper``: three steps of a model under each hook; what the hook's summary and state say then."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.scripts.paper_models import MODELS, Model
from ratchet_hooks.manage.managed_ddp import close_group, managed_ddp
from ratchet_hooks.specs.hook_specs import AllreduceSpec, HookSpec, PowerSGDSpec

START: Final = 2  # the earliest iteration at which torch lets PowerSGD compress
STEPS: Final = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True, help="file of the rendezvous")
    parser.add_argument("--model", required=True, choices=MODELS)
    parser.add_argument("--powersgd-ranks", required=True, help="separated by commas")
    parser.add_argument("--out", type=Path, required=True, help="JSON, written by rank 0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.FileStore(str(args.store), args.world)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.world)
    torch.manual_seed(args.rank)
    model = MODELS[args.model]
    result = {"allreduce": count(model, AllreduceSpec())}
    for low in args.powersgd_ranks.split(","):
        result[low] = count(model, PowerSGDSpec(matrix_approximation_rank=int(low), start_powerSGD_iter=START))
    if args.rank == 0:
        args.out.write_text(json.dumps(result))
    close_group()


def count(model: Model, spec: HookSpec) -> dict[str, Any]:
    """``summary``: the hook's after the last step. ``tensors``: by name shape and elements of its P and Q, none of a tensor that
    is sent as it is."""
    ddp, hook = managed_ddp(model.build(), spec)
    for _ in range(STEPS):
        inputs, classes = model.batch()
        nn.functional.cross_entropy(ddp(inputs), classes).backward()
        ddp.zero_grad()
    state, _ = hook.capture()
    tensors = {
        name: {
            "shape": list(p.shape),
            "factors": sum(state[f"{f}/{name}"].numel() for f in "pq" if f"{f}/{name}" in state),
        }
        for name, p in ddp.module.named_parameters()
    }
    return {"summary": hook.summary(rank=0, step=STEPS).values(), "tensors": tensors}


if __name__ == "__main__":
    main()
