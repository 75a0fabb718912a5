"""Two ranks of a script under torch alone, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.fork_server import RANKS, Interpreter
from tests.support.object_stores import free_port


def run_plain(
    *script: object,
    seconds: float = 60,
    directory: Path | None = None,
    ended: Path | None = None,
    interpreters: Interpreter = RANKS,
    **variables: str,
) -> str:
    """Under torch alone, as torchrun starts it; what rank 0 prints. Up to five times: at the end of a script on gloo a race in
    torch between the threads of DDP's reducer hangs or aborts a process now and then. ``ended``: each try has an empty current
    directory; that of the one which ended well gets this path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RATCHET")}
    for number in range(5):
        if ended is not None:
            directory = ended.with_name(f"{ended.name}-{number}")
            directory.mkdir(parents=True)
        env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        env |= variables
        with ExitStack() as files:
            outs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
            ranks = [
                interpreters.start(
                    [sys.executable, *map(str, script)],
                    out.fileno(),
                    errors=2,
                    env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=directory,
                )
                for rank, out in enumerate(outs)
            ]
            try:
                if [rank.wait(seconds) for rank in ranks] == [0, 0]:
                    if ended is not None and directory is not None:
                        directory.rename(ended)
                    outs[0].seek(0)
                    return outs[0].read()
            except subprocess.TimeoutExpired:
                pass
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
    raise AssertionError("the plain script did not end well in five runs")


def load_weights(out: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(out / f"{rank}.safetensors") for rank in range(2)]
