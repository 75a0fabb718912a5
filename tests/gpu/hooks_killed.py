"""Rows ``hooks-gloo``, ``hooks-nccl`` and ``hooks-mixed``: real ranks are killed with SIGKILL, new ones go on from their last
save, and every tensor of every rank is compared with an undisturbed run's: parameters, optimizer, hook, generators, scaler.

Each group of ranks resumes the case before, then begins the next one and is killed in it: a start per case.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.gpu.ranks import KilledRanks
from tests.gpu.work import Work
from tests.support import exact_matrix
from tests.support.exact_matrix import START, TOTAL, Row
from tests.support.gloo_ranks import Named, RankFailure

if TYPE_CHECKING:
    from tests.support.exact_runs import Result

_RUNS: Final[Any] = Named("tests.gpu.hook_runs")
_TURN: Final = "dynamic-turn"
_LEAST: Final = 8.0
"""Seconds that a case may need: with less left none is begun."""


def gloo(work: Work) -> str:
    labels = exact_matrix.hook_labels()
    if work.size == "cheap":
        labels = ["powerSGD", "custom"]
    return _walk(work, [_usual(label, "2") for label in labels], "gloo")


def nccl(work: Work) -> str:
    """Over gloo on the CPU, where only tests call it: one rank."""
    labels = ["powerSGD"] if work.size == "cheap" else exact_matrix.hook_labels()
    alone = []
    for label in labels:
        if exact_matrix.clash(("hook", label), ("world", "1")):
            work.exclude(label, "it groups at least two ranks, and NCCL runs one rank per GPU")
        else:
            alone.append(_usual(label, "1"))
    return _walk(work, alone, "nccl" if work.device == "cuda" else "gloo")


def mixed(work: Work) -> str:
    """Every level of every other factor of the matrix, with one or two ranks."""
    usual = {factor: levels[0] for factor, levels in exact_matrix.factors().items()}
    rows = [row | {"world": min(row["world"], "2")} for row in exact_matrix.reduced_matrix()]
    rows = [
        row for row in rows if any(row[factor] != usual[factor] for factor in row if factor not in ("hook", "world"))
    ]
    if work.device == "cuda":
        rows = [_on_cuda(work, row) for row in rows]
    return _walk(work, rows[1:3] if work.size == "cheap" else rows, "gloo")


def _on_cuda(work: Work, row: Row) -> Row:
    """The row without what torch cannot do on CUDA."""
    if (row["model"], row["precision"]) != ("dtypes", "fp16-scaler"):
        return row
    work.exclude("dtypes fp16-scaler", "on CUDA torch's GradScaler refuses gradients in bfloat16")
    return row | {"precision": "float32"}


def _usual(label: str, world: str) -> Row:
    """Gradients become ready in another order from the middle on; otherwise what is usual."""
    row = {factor: levels[0] for factor, levels in exact_matrix.factors().items()}
    return row | {"hook": label, "world": world, "graph": _TURN}


def _walk(work: Work, rows: Sequence[Row], backend: str) -> str:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch's advice on find_unused_parameters
    lanes = min(len(rows), max(1, min(8, len(os.sched_getaffinity(0)) // 2)))
    with ThreadPoolExecutor(lanes) as threads:
        judged = list(threads.map(lambda lane: _Lane(work, lane, backend).walk(rows[lane::lanes]), range(lanes)))
    identical, kills, tensors = (sum(numbers) for numbers in zip(*judged, strict=True))
    return f"{identical} of {len(rows)} identical after {kills} SIGKILLs over {backend}, {tensors} tensors compared"


class _Lane:
    """Cases one after the other. ``walk`` returns how many were identical, killed, and the tensors compared."""

    def __init__(self, work: Work, number: int, backend: str) -> None:
        self._work, self._backend, self._folder = work, backend, work.folder / f"lane-{number}"
        self.identical = self.kills = self.tensors = 0
        self._killed: tuple[Row, Path] | None = None

    def walk(self, rows: Sequence[Row]) -> tuple[int, int, int]:
        for number, row in enumerate([*rows, None]):
            if row is not None and self._work.left < _LEAST:
                self._work.red(_name(row), "no time left")
                continue
            world = int((row or rows[-1])["world"])
            if self._killed is not None and self._killed[0]["world"] != str(world):
                self._one_group(int(self._killed[0]["world"]), None, number)
            self._one_group(world, row, number)
        return self.identical, self.kills, self.tensors

    def _one_group(self, world: int, row: Row | None, number: int) -> None:
        """Finish the killed case, and begin ``row``, which is killed."""
        if row is None and self._killed is None:
            return
        ranks = KilledRanks(world, deadline=60.0, backend=self._backend)
        try:
            if self._killed is not None:
                self._finish(ranks, *self._killed)
            if row is not None and ranks.alive:
                self._begin(ranks, row, number)
                return
        finally:
            ranks.close(clean=False)
        if row is not None:  # the case before has ended its ranks
            self._one_group(world, row, number)

    def _finish(self, ranks: KilledRanks, row: Row, folder: Path) -> None:
        self._killed = None
        try:
            found: list[Result] = ranks.run(_RUNS.resumed, row, self._work.device, str(folder))
        except RankFailure as failure:
            self._work.red(_name(row), f"resumed: {failure}")
            return
        if not all(one.finite and one.moved for one in found):
            self._work.red(_name(row), "not worth comparing: weights are not finite, or none moved")
            return
        problems = [f"rank {rank}: {', '.join(one.different[:5])}" for rank, one in enumerate(found) if one.different]
        self.identical += not problems
        self.tensors += sum(one.tensors for one in found)
        self._work.judge(
            _name(row), problems, f"identical; ranks: {ranks.world}; saved after step {_save_at(row)}, killed later"
        )

    def _begin(self, ranks: KilledRanks, row: Row, number: int) -> None:
        folder = self._folder / str(number)
        folder.mkdir(parents=True)
        given = (row, self._work.device, str(folder))
        beyond = [folder / f"beyond-{rank}" for rank in range(ranks.world)]
        try:
            ranks.run(_RUNS.undisturbed, *given)
            until = _RUNS.until_killed, *given, _save_at(row)
            ranks.kill_during(*until, when=lambda: all(file.exists() for file in beyond))
        except RankFailure as failure:
            self._work.red(_name(row), str(failure))
            return
        self.kills += 1
        self._killed = row, folder


def _save_at(row: Row) -> int:
    """The step after which is saved: from the start of compression on."""
    return exact_matrix.kills_of(row, 0)[1][-1] if row["compile"] == "no" else min(START, TOTAL - 2)


def _name(row: Row) -> str:
    return exact_matrix.describe(row).removesuffix(f" {_TURN}")
