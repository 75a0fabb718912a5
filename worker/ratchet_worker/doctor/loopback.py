"""Checks that two processes of this machine can reduce a tensor over loopback with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from ratchet_contract.doctor.findings import Finding, failed, ok

NAME: Final = "gloo"
SECONDS: Final = 30.0
ELEMENTS: Final = 10_000
_ADVICE: Final = (
    "let processes of this machine talk over 127.0.0.1 (firewall rules on lo, a sandbox without network), and unset "
    "GLOO_* variables"
)


class Peer:
    """Rank 1 of the check, in a process that the constructor starts. It also sets ``GLOO_SOCKET_IFNAME`` in the calling
    process."""

    def __init__(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as in every job on one machine (``agent.rank_environment``)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ratchet_worker.doctor.loopback"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def reduce(self) -> Finding:
        """Run the all-reduce with rank 1 and return the finding, failed unless both ranks get the bit-exact sum. Blocks."""
        from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

        began = time.monotonic()
        limit = timedelta(seconds=SECONDS)
        try:
            store = TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
            assert self._process.stdin is not None
            self._process.stdin.write(f"{store.port}\n")
            self._process.stdin.flush()
            mine = all_reduce(0, store, limit)
            theirs = store.get("digest/1").decode()
        except Exception as error:  # torch raises DistStoreError, RuntimeError, ValueError for a network that fails
            return failed(NAME, "no answer", detail=self._why(error), cure=_ADVICE)
        if not mine == theirs == expected():
            return failed(
                NAME,
                "wrong sum",
                cure="report it: this must never happen",
                detail="an all-reduce of two processes did not give the sum of what they put in",
            )
        return ok(
            NAME,
            "bit-equal",
            detail=f"all-reduce of {ELEMENTS} elements between two processes in {time.monotonic() - began:.1f} s",
        )

    def _why(self, error: Exception) -> str:
        """Return why the check failed, from the output of rank 1's process if that has failed, else from ``error``."""
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if self._process.poll() in (None, 0):
            return first
        assert self._process.stderr is not None
        last = (self._process.stderr.read().strip().splitlines() or ["it printed nothing"])[-1]
        return f"the second process ended with {self._process.returncode}: {last}"

    def close(self) -> None:
        """End rank 1 at once, finished or not."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def operand(rank: int) -> Any:
    """The tensor that ``rank`` contributes: float32 of shape (ELEMENTS,), the same in every run."""
    import torch

    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))


def expected() -> str:
    """The digest of the right sum."""
    return digest(operand(0) + operand(1))


def digest(tensor: Any) -> str:
    """The SHA-256 of a tensor's bytes, in hex."""
    import hashlib

    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def all_reduce(rank: int, store: Any, limit: timedelta) -> str:
    """Sum both ranks' operands, as ``rank``, and return the digest of the result, which is also written to the store."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    try:
        tensor = operand(rank)
        dist.all_reduce(tensor)
        store.set(f"digest/{rank}", digest(tensor))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return digest(tensor)


def main() -> int:
    """Act as rank 1: read the store's port from standard input and do the all-reduce; without a port do nothing. Return 0."""
    from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

    line = sys.stdin.readline()
    # Rank 0 has given up.
    if not line:
        return 0
    limit = timedelta(seconds=SECONDS)
    all_reduce(1, TCPStore("127.0.0.1", int(line), is_master=False, timeout=limit), limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
