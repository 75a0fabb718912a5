"""Functions run in N real ranks of a gloo group, without paying for an interpreter and an import of torch per rank.

A fork server imports torch once; ranks are forked from it. ``Ranks`` keeps one group for many calls:

    with Ranks(3) as ranks:
        results = ranks.run(function, *args)     # function(rank, *args) in every rank, results in rank order

``function`` must be importable (at the top level of a module), or named (``Named``). A rank that raises, dies or outlasts
the deadline makes ``run`` raise ``RankFailure`` with every rank's traceback, and the group is gone. Ranks die with their parent.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

from ratchet_worker.host.cpu import gc_disabled

_PR_SET_PDEATHSIG = 1


class RankFailure(AssertionError):
    """One or more ranks failed; the message holds what each said last."""


class Named:
    """A module's functions by their names: the ranks that run one import it, and not every process that collects tests."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> str:
        return f"{self._module}:{name}"


class Ranks:
    """A group of ``world`` processes over loopback; the rendezvous is a file, so no port is chosen."""

    preload: ClassVar[tuple[str, ...]] = ("tests.support.fork_server_preload", "torch", "torch._dynamo")
    """What the fork server imports."""

    def __init__(self, world: int, *, deadline: float = 60.0, backend: str = "gloo") -> None:
        self.world = world
        self.deadline = deadline
        self._directory = tempfile.TemporaryDirectory(prefix="ratchet-ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(self.preload))
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            args = (rank, world, str(Path(self._directory.name, "store")), theirs, deadline, backend)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(clean=kind is None)

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    def run(self, function: Callable[..., Any] | str, *args: Any) -> list[Any]:
        """``function(rank, *args)`` on every rank at once; the results in rank order."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + self.deadline
        while len(answers) < self.world:
            left = {self._pipes[r]: r for r in range(self.world) if r not in answers}
            ready = wait(list(left), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                answers[left[pipe]] = self._receive(left[pipe])  # type: ignore[index]
            if any(not ok for ok, _ in answers.values()):
                end = min(end, time.monotonic() + 2.0)  # the others mostly fail with it: let them say how
        if len(answers) < self.world or any(not ok for ok, _ in answers.values()):
            self.close(clean=False)
            raise RankFailure(_report(answers, self.world))
        return [answers[rank][1] for rank in range(self.world)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            self._processes[rank].join(5.0)
            return False, f"died with exit code {self._processes[rank].exitcode}"
        return answer

    def kill(self) -> None:
        """SIGKILL to every rank, before any of them can end by itself. Raises ``RankFailure`` if one ended otherwise."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        codes = [process.exitcode for process in self._processes]
        self.close(clean=False)
        if any(code != -signal.SIGKILL for code in codes):
            raise RankFailure(f"ranks to be killed ended with exit codes {codes}")

    def close(self, *, clean: bool = True) -> None:
        """End all ranks. ``clean``: through barrier and destroy_process_group, and every exit code must be 0."""
        codes: list[int | None] = []
        for pipe in self._pipes:
            if clean:
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            if clean:
                process.join(self.deadline)
            if process.is_alive():
                process.kill()
            process.join()
            codes.append(process.exitcode)
            process.close()
        self._pipes, self._processes = [], []
        self._directory.cleanup()
        if clean and any(codes):
            raise RankFailure(f"ranks ended with exit codes {codes}")


def run_ranks(world: int, function: Callable[..., Any], *args: Any, deadline: float = 60.0) -> list[Any]:
    """``function(rank, *args)`` in a fresh group of processes that ends with it."""
    with Ranks(world, deadline=deadline) as ranks:
        return ranks.run(function, *args)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _serve(rank: int, world: int, store: str, pipe: Connection, deadline: float, backend: str) -> None:
    die_with_parent()
    import torch
    import torch.distributed as dist

    from ratchet_hooks.manage.managed_ddp import close_group

    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    torch.set_num_threads(1)
    rendezvous = dist.FileStore(store, world)
    dist.init_process_group(backend, store=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=deadline))
    while (call := _receive_call(pipe)) is not None:
        function, args = call
        try:
            pipe.send((True, _resolve_function(function)(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    close_group()


def _resolve_function(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, name = function.split(":")
    with gc_disabled():
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _receive_call(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        os._exit(1)  # the parent gave up: no barrier, the others may be gone


def _report(answers: dict[int, tuple[bool, Any]], world: int) -> str:
    lines = []
    for rank in range(world):
        ok, value = answers.get(rank, (False, "no answer before the deadline"))
        lines.append(f"rank {rank}: {'ok' if ok else value}")
    return "\n".join(lines)
