"""A checkpoint, or a copy in memory, at every step of the built-in task ``bytelm``. It is compared with the same job without any
until its end, and with the limit: the same job, while a thread copies the state at every step, makes one digest of the copy,
writes it and syncs it (not for copies in memory), and that is all. One rank leaves one of two cores for the saving threads, two
ranks leave none. The states have 11 MB and 100 MB.

All jobs are there at once, and blocks of their steps take turns: while one trains, the ranks of the others wait within a step.
"""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from benchmarks.checkpoint_jobs import SCRIPTS, forget
from benchmarks.processes import attempt_paths, ended, logs, until
from benchmarks.stats import Estimate, estimate
from examples.demo.processes import DemoError, Service, spool

AIM: Final = 1.03  # Ratchet / limit
_DEADLINE: Final = 240.0  # seconds, for one block
_SHORT: Final = {"held_back_bytes": 4096}  # what is evaluated at the end is not measured


@dataclass(frozen=True)
class Size:
    """``count`` steps in each of two times ``pairs`` blocks, behind ``before`` that are not counted. ``task``: its arguments."""

    before: int
    count: int
    pairs: int
    task: dict[str, Any]
    ranks: int = 2


_WIDE: Final = {"width": 256, "layers": 4, "grams": 6550}
SIZES: Final = {
    "11 MB, 1 rank": Size(before=4, count=16, pairs=12, task={}, ranks=1),
    "11 MB, 2 ranks": Size(before=4, count=16, pairs=12, task={}),
    "100 MB, 1 rank": Size(before=1, count=3, pairs=9, task=_WIDE, ranks=1),
    "100 MB, 2 ranks": Size(before=1, count=3, pairs=9, task=_WIDE),
}
_RATIOS: Final = ("Ratchet / limit", "of CPU time", "aim", "Ratchet / without", "of CPU time", "limit / without")


def table(service: Service, folder: Path, sizes: dict[str, Size] = SIZES) -> None:
    print(_line("", *_RATIOS, "of CPU time", "ms: Ratchet", "limit", "without", "save", "MB"))
    for title, size in sizes.items():
        begin = time.monotonic()
        with ExitStack() as stack:
            jobs = [
                stack.enter_context(_Job(service, folder, size, **which))
                for which in ({}, {"every": 1}, {"limit": "disk"}, {"memory": 1}, {"limit": "memory"})
            ]
            found = [_round(number, jobs) for number in range(size.pairs)]
            saves, nbytes = jobs[1].saves(), jobs[1].nbytes()
        print(f"  ran bytelm, {title}: {time.monotonic() - begin:.0f} s")
        without, save, save_limit, copy, copy_limit = zip(*found, strict=True)
        took = f"{1e3 * statistics.median(saves):.1f}"
        for name, ours, limit, last in ((title, save, save_limit, took), ("  in memory", copy, copy_limit, "")):
            (wall, cpu), beside, alone = (_ratios(*two) for two in ((ours, limit), (ours, without), (limit, without)))
            aim = f"{AIM:.2f}, {'met' if wall.high <= AIM else 'not met'}"
            ms = [f"{1e3 * statistics.median(s for s, _ in one) / size.count:.1f}" for one in (ours, limit, without)]
            ratios = [str(one) for one in (*beside, *alone)]
            print(_line(name, str(wall), str(cpu), aim, *ratios, *ms, last, f"{nbytes / 1e6:.1f}"), flush=True)


def _ratios(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> list[Estimate]:
    """Of the seconds, and of the processor time, of the blocks of two jobs, round by round."""
    return [estimate([a[kind] / b[kind] for a, b in zip(one, other, strict=True)]) for kind in (0, 1)]


def _line(title: str, *columns: str) -> str:
    widths = (20, 20, 13, 20, 20, 20, 20, 11, 6, 7, 6, 6)
    return f"{title:<15} " + " ".join(f"{text:>{width}}" for text, width in zip(columns, widths, strict=True))


def _round(number: int, jobs: Sequence[_Job]) -> list[tuple[float, float]]:
    """A block of each, in their order; each is the first by turns."""
    found: dict[int, tuple[float, float]] = {}
    for turn in range(len(jobs)):
        which = (turn + number) % len(jobs)
        found[which] = jobs[which].block()
    return [found[which] for which in range(len(jobs))]


class _Job:
    """A job that trains when ``block`` says so, and has ended when its ``with`` has."""

    def __init__(
        self,
        service: Service,
        folder: Path,
        size: Size,
        *,
        every: int | None = None,
        memory: int | None = None,
        limit: str | None = None,
    ) -> None:
        self._service, self._place = service, Path(tempfile.mkdtemp(dir=folder))
        self._listener = socket.socket(socket.AF_UNIX)
        turns = self._place / "turns"
        self._listener.bind(str(turns))
        self._wanted = size.ranks
        self._listener.listen(size.ranks)
        self._listener.settimeout(0.2)
        self._ranks: list[TextIO] = []
        arguments = {
            "turns": str(turns),
            "before": size.before,
            "count": size.count,
            "blocks": size.pairs,
            "limit": limit,
        }
        spec = {
            "name": "bench-every-step",
            "code": {"path": str(SCRIPTS)},
            "task": {"entrypoint": "every_step:Blocks", "args": {**_SHORT, **arguments, **size.task}},
            "world": {"ranks_per_node": size.ranks, "device": "cpu"},
            "resources": {"cpus_per_rank": 1},
            "checkpoint": {"every_steps": every, "memory_every_steps": memory, "first": "off", "keep_last": 2},
        }
        self._id = service.client.submit(spec).id
        self._attempt = attempt_paths(service, self._id)

    def __enter__(self) -> _Job:
        """Once its ranks wait for their first turn."""
        try:
            end = time.monotonic() + _DEADLINE
            while len(self._ranks) < self._wanted:
                self._insist(time.monotonic() < end)
                with suppress(TimeoutError):
                    channel, _ = self._listener.accept()
                    channel.settimeout(_DEADLINE)
                    self._ranks.append(channel.makefile("rw"))
                    channel.close()  # the file keeps it
            self._answers()
            return self
        except BaseException:
            self._forget()
            raise

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._go()
                until("the job to end", lambda: ended(self._attempt), _DEADLINE, self._attempt)
        finally:
            self._forget()

    def block(self) -> tuple[float, float]:
        """Seconds of the slowest rank, and processor time of all."""
        self._go()
        answers = self._answers()
        return max(seconds for _, seconds, _ in answers), sum(cpu for _, _, cpu in answers)

    def saves(self) -> list[float]:
        """Seconds of each, from the boundary to the commit, as Ratchet reports them."""
        return [m["seconds"] for m in self._checkpoints() if m["reason"] == "schedule"]

    def nbytes(self) -> int:
        size: int = self._checkpoints()[-1]["size"]
        return size

    def _checkpoints(self) -> Sequence[dict[str, Any]]:
        return [message for message in spool(self._attempt, 0) if message["kind"] == "checkpoint"]

    def _go(self) -> None:
        for rank in self._ranks:
            self._or_logs(lambda rank=rank: (rank.write("g"), rank.flush()))  # type: ignore[misc]

    def _answers(self) -> list[list[float]]:
        lines = [self._or_logs(rank.readline) for rank in self._ranks]
        self._insist(all(lines))
        return [json.loads(line) for line in lines]

    def _or_logs(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            raise DemoError(f"{self._attempt.root}: {error}\n{logs(self._attempt)}") from error

    def _insist(self, well: bool) -> None:
        if not well or ended(self._attempt) is not None:
            raise DemoError(f"a job does not train as it should\n{logs(self._attempt)}")

    def _forget(self) -> None:
        for rank in self._ranks:
            with suppress(OSError):
                rank.close()
        self._listener.close()
        forget(self._service, self._id, self._place)
