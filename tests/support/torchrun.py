"""A script under torchrun, of which ranks are killed; torchrun starts all of them again, once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.fork_server import RANKS


class Torchrun:
    """``torchrun --nproc-per-node 2 --max-restarts 1 SCRIPT`` in ``directory``, by the interpreter ``python``."""

    def __init__(self, script: Sequence[str], directory: Path, python: str = sys.executable) -> None:
        self.output = directory / "output.txt"
        options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.05"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        # Else the restarted ranks share a store with the dead ones, whose addresses gloo finds in it.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with self.output.open("wb") as output:
            command = [python, "-m", "torch.distributed.run", *options, *script]
            self.process = RANKS.start(command, output.fileno(), env=environment, cwd=directory)
        self._directory = directory.resolve()

    def kill(self, rank: int) -> None:
        for entry in Path("/proc").iterdir():
            with suppress(OSError, IndexError):
                session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[3]
                mine = session == entry.name and (entry / "cwd").readlink() == self._directory
                if mine and f"\0RANK={rank}\0".encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    return
        raise AssertionError(f"rank {rank} has gone: {self.output.read_text()}")

    def wait(self) -> str:
        """What all of them printed."""
        code = self.process.wait(200)
        text = self.output.read_text()
        assert code == 0, text
        return text

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # torchrun ends its ranks
            self.process.wait(30)
