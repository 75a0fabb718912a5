"""One rank of ``make bench ONLY=accuracy``: the digits task, trained under each hook with each seed in one group of ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from ratchet_hooks.manage.managed_ddp import close_group, managed_ddp
from ratchet_hooks.specs.hook_specs import hook_spec
from ratchet_worker.data.loader import endless
from ratchet_worker.host import determinism
from ratchet_worker.state import rng
from ratchet_worker.task import TaskContext
from ratchet_worker.tasks.digits import DigitsTask
from ratchet_worker.training.evaluation import preserving_state

CPU: Final = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True, help="file of the rendezvous")
    parser.add_argument("--hooks", required=True, help="JSON: specs by name")
    parser.add_argument("--seeds", type=int, required=True)
    parser.add_argument("--task", required=True, help="JSON: arguments of the task")
    parser.add_argument("--out", type=Path, required=True, help="JSON, written by rank 0")
    args = parser.parse_args()
    determinism.apply("strict", 1)
    store = dist.FileStore(str(args.store), args.world)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.world)
    result: dict[str, list[dict[str, Any]]] = {}
    for name, hook in json.loads(args.hooks).items():
        result[name] = []
        for seed in range(args.seeds):
            result[name].append(train(args.rank, hook, seed, json.loads(args.task)))
            if args.rank == 0:
                print(f"{name}, seed {seed}: {result[name][-1]['accuracy']:.2f} %", file=sys.stderr, flush=True)
    if args.rank == 0:
        args.out.write_text(json.dumps(result))
    close_group()


def train(rank: int, hook: Mapping[str, Any], seed: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``accuracy``: percent of the held-back images that the net names rightly after the last step, over all ranks. ``sent``:
    bytes that the hook sent in that step.

    ``DigitsTask(**arguments)`` under the hook of a spec, step by step what a job with this ``seed`` does: the same generators,
    order of the data, DDP and evaluation.
    """
    world = dist.get_world_size()
    rng.seed_all(seed, rank)
    task = DigitsTask(**arguments)
    parts = task.build(TaskContext(rank, world, rank, CPU, seed))
    ddp, managed = managed_ddp(parts.model, hook_spec(hook))
    scheduler: Any = parts.scheduler
    for batch in islice(endless(parts.train, lambda: None), parts.steps()):
        loss, _ = task.loss(ddp, batch)
        loss.backward()
        parts.optimizer.step()
        scheduler.step()
        parts.optimizer.zero_grad()
        managed.average_parameters()
    with preserving_state(ddp, managed, parts.train, CPU, broadcast=True):
        counts = torch.zeros(2, dtype=torch.float64)
        for batch in task.evaluation():
            counts += torch.tensor(task.evaluate(ddp.module, batch)["test_accuracy"], dtype=torch.float64)
    dist.all_reduce(counts)
    right, count = counts.tolist()
    summary = managed.summary(rank=rank, step=parts.steps())
    return {"accuracy": 100 * right / count, "sent": summary.bytes_after}


if __name__ == "__main__":
    main()
