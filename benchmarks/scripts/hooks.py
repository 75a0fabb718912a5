"""One rank of ``make bench ONLY=hooks``: blocks of steps under Ratchet's hook and under torch's own take turns.

Three equal nets train on equal batches in this process, over the same process group: under the managed hook, under torch's, and
under torch's once more, against which torch's is the control. Torch's is in the middle of every turn, so that both it is compared
with are its neighbours, and the turns go to and fro.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scripts.loops import START_ITERATION, WARM_UP, net, timed
from benchmarks.scripts.stock import ONE_BUCKET, After, mend_batched_powersgd, register
from ratchet_hooks.manage.managed_ddp import close_group, managed_ddp
from ratchet_hooks.specs.registry import HOOKS

LOW_RANK: Final = {"matrix_approximation_rank": 2, "start_powerSGD_iter": START_ITERATION}
SPECS: Final[dict[str, dict[str, Any]]] = {
    "allreduce": {},
    "fp16_compress": {},
    "bf16_compress": {},
    "powerSGD": LOW_RANK,
    "batched_powerSGD": LOW_RANK,
    "post_localSGD": {"start_localSGD_iter": 2, "subgroup_size": 1, "model_averaging_period": 4},
    "noop": {},
    "allreduce + fp16_compress_wrapper": {"wrapper": "fp16_compress_wrapper"},
    "powerSGD + fp16_compress_wrapper": {"wrapper": "fp16_compress_wrapper", **LOW_RANK},
}
"""By hook, as the registry names it, and wrapper: what the spec of Ratchet's says, and how torch's is registered."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True, help="file of the rendezvous")
    parser.add_argument("--hook", required=True, choices=SPECS)
    for name in ("width", "depth", "batch", "block", "pairs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON, written by rank 0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.FileStore(str(args.store), args.world)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.world)
    mend_batched_powersgd()
    batch = torch.randn(args.batch, args.width)
    loops = {"managed": managed(args.hook, args.width, args.depth, batch)}
    loops |= {name: stock(args.hook, args.width, args.depth, batch) for name in ("stock", "control")}
    blocks = measure(loops, args.block, args.pairs)
    if args.rank == 0:
        parameters = sum(p.numel() for p in net(args.width, args.depth).parameters())
        args.out.write_text(json.dumps({"blocks": blocks, "parameters": parameters}))
    close_group()


def managed(hook: str, width: int, depth: int, batch: torch.Tensor) -> Callable[[int], None]:
    """The loop that a user of ``ratchet_hooks`` writes."""
    entry = HOOKS[hook.partition(" + ")[0]]
    spec: Any = entry.spec(**SPECS[hook])
    model, managed_hook = managed_ddp(net(width, depth), spec, ddp={"bucket_cap_mb": cap(hook)})
    return loop(model, managed_hook.average_parameters, batch)


def stock(hook: str, width: int, depth: int, batch: torch.Tensor) -> Callable[[int], None]:
    """The same written by hand around torch's own."""
    model = DistributedDataParallel(net(width, depth), bucket_cap_mb=cap(hook))
    return loop(model, register(model, hook.partition(" + ")[0], **SPECS[hook]), batch)


def cap(hook: str) -> float | None:
    """One bucket where torch's own hook cannot have more of them on gloo: its all-reduces cross, and the process aborts."""
    return ONE_BUCKET if "powerSGD" in hook else None


def loop(model: nn.Module, after: After, batch: torch.Tensor) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = nn.functional.mse_loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            after()
            optimizer.zero_grad()
            loss.item()

    return run


def measure(loops: dict[str, Callable[[int], None]], block: int, pairs: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds and CPU seconds of every block of each loop, in order."""
    for run in loops.values():
        run(WARM_UP)
    blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for pair in range(pairs):
        for name in loops if pair % 2 == 0 else reversed(loops):
            blocks[name].append(timed(loops[name], block))
    return blocks


if __name__ == "__main__":
    main()
