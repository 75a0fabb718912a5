"""Starting and stopping a small group of ranks again and again: no rank may end other than by itself, with exit code 0.

    python -m tests.e2e.teardown --n 1000

Each rank is a process of its own that joins a gloo group, takes a step under a managed hook, leaves the group (several times
where ``--groups`` says so) and ends as a Python program does: finalisers, destructors and all. A careless teardown aborts there,
now and then: ``terminate called without an active exception``. Ranks are forked from one process that has imported torch.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the first DDP of a process imports it
import torch.distributed as dist
import torch.nn as nn

from ratchet_hooks.manage.managed_ddp import close_group, managed_ddp
from ratchet_hooks.specs.hook_specs import AllreduceSpec, HookSpec, PowerSGDSpec, QuantizationPertensorSpec

SPECS: list[HookSpec] = [
    AllreduceSpec(),
    AllreduceSpec(wrapper="fp16_compress_wrapper"),
    QuantizationPertensorSpec(),
    PowerSGDSpec(start_powerSGD_iter=0, use_error_feedback=False, warm_start=False),
]
WORLD = 2
DEADLINE_S = 120.0  # of one cycle


def join_step_leave(rank: int, store: Path, spec: HookSpec) -> None:
    """What a cycle is of."""
    rendezvous = dist.FileStore(str(store), WORLD)
    dist.init_process_group(
        "gloo", store=rendezvous, rank=rank, world_size=WORLD, timeout=timedelta(seconds=DEADLINE_S)
    )
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    ddp, _ = managed_ddp(model, spec, ddp={"bucket_cap_mb": 0.0001}, device=torch.device("cpu"))
    ddp(torch.ones(2, 8)).sum().backward()
    close_group()


def run_cycle(directory: Path, first: int, groups: int) -> list[str]:
    """``groups`` groups, one after the other, of one pair of processes; how those ended that did not end well. Raises
    ``SystemExit`` in the ranks: they are to end as Python programs do, past nothing that would tidy up after all."""
    pids: dict[int, int] = {}
    for rank in range(WORLD):
        if (pid := os.fork()) == 0:
            log = os.open(directory / f"rank-{rank}.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for number in range(first, first + groups):
                join_step_leave(rank, directory / f"store-{number}", SPECS[number % len(SPECS)])
            raise SystemExit(0)
        pids[pid] = rank
    return [
        f"groups {first} to {first + groups - 1}, rank {rank}: {how}\n{(directory / f'rank-{rank}.log').read_text()[-2000:]}"
        for rank, how in _ends(pids)
    ]


def _ends(pids: dict[int, int]) -> list[tuple[int, str]]:
    bad, end = [], time.monotonic() + DEADLINE_S
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > end:
                for late in pids:
                    os.kill(late, signal.SIGKILL)
                end = float("inf")
            time.sleep(0.002)
            continue
        code = os.waitstatus_to_exitcode(status)
        if code:
            bad.append((pids[pid], f"exit code {code}" if code > 0 else signal.Signals(-code).name))
        del pids[pid]
    return bad


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.teardown")
    parser.add_argument("--n", type=int, default=1000, help="groups that are started and stopped")
    parser.add_argument("--groups", type=int, default=1, help="how many of them one pair of processes goes through")
    options = parser.parse_args(arguments)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    failures: list[str] = []
    gc.collect()
    gc.freeze()  # a rank need not search what it has of this process when it ends: a quarter of the time
    directory = Path(tempfile.mkdtemp(prefix="ratchet-teardown-"))
    for first in range(0, options.n, options.groups):
        failures += run_cycle(directory, first, min(options.groups, options.n - first))
    shutil.rmtree(directory)
    print(*failures, f"{options.n} groups of {WORLD} ranks: {len(failures)} ranks ended badly", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
