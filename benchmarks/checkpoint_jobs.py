"""Jobs of ``benchmarks.checkpoint``: real ranks under a real service and agent, and what all of them measured together."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.processes import attempt_paths, ended, logs
from benchmarks.stats import Estimate, estimate
from examples.demo.processes import DemoError, Service, spool
from ratchet_contract.phases import Cause

SCRIPTS: Final = Path(__file__).with_name("scripts")
CYCLE: Final = 2000
"""Steps between two saves of Ratchet's: more than all other ways take in a round."""
SHARE: Final = "copy of the share"
DIGEST: Final = "digest of the share"
WRITE: Final = "write of the share"
DIRECT_WRITE: Final = "O_DIRECT write"
_SLOTS: Final = 10  # ranks that run at a time, on however many cores
_PATIENCE: Final = 180.0  # seconds in which a job gets on by a round


@dataclass(frozen=True)
class Setup:
    """One job. ``ways``: of other packages, in the first ``way_rounds`` of its ``rounds``, and the limit, in all. ``restores``:
    rounds of loading what was saved. ``batch``: samples per rank, by which a step takes longer. ``cycle``: see ``CYCLE``."""

    megabytes: int
    ranks: int
    rounds: int
    staging: str = "overlapped"
    ways: tuple[str, ...] = ()
    way_rounds: int = 0
    restores: int = 0
    batch: int = 16
    cycle: int = CYCLE

    def __str__(self) -> str:
        others = f" and {len(self.ways)} other{'s' * (len(self.ways) > 1)}" if self.ways else ""
        return f"{self.megabytes} MB, {self.ranks} rank{'s' * (self.ranks > 1)}, {self.staging}{others}"


@dataclass(frozen=True)
class Saves:
    """One way's saves but the first, each of all ranks together. Seconds.

    ``lost``: what the training lost by the clock, ``stall`` and the extra time of steps beside the save; ``cpu``: processor time
    of all ranks beside that of the steps; ``step``: a step without a save, the median; ``told``: what Ratchet reports as its
    stall, ``handing_over``: processor time of the boundary in the loop's thread; ``beside``: did steps run beside the saves?
    """

    first: float
    stall: list[float]
    total: list[float]
    lost: list[float]
    cpu: list[float]
    told: list[float | None]
    handing_over: list[float]
    step: float
    beside: bool

    def interference(self) -> list[float]:
        """Extra time of the steps that ran beside the save, as a share of the save."""
        three = zip(self.lost, self.stall, self.total, strict=True)
        return [(lost - stall) / total for lost, stall, total in three]


@dataclass(frozen=True)
class Measured:
    """``limits``: seconds of the slowest rank, all at one time. ``loads``: of each way of loading, likewise. ``trial``: seconds
    that the loop stood still once, in the attempt's first step, until it was known what may be copied beside a step.
    ``busy_cores``: of one rank, how much longer a step takes while all other cores compute."""

    setup: Setup
    nbytes: int
    tensors: int
    saves: dict[str, Saves]
    limits: dict[str, list[float]]
    loads: dict[str, list[float]]
    trial: float
    busy_cores: list[float]

    def ratio(self, seconds: Sequence[float], limit: str) -> Estimate:
        """Of each save to the limit as it was in the same round."""
        return estimate([a / b for a, b in zip(seconds, self.limits[limit][: len(seconds)], strict=True)])


@contextmanager
def service(folder: Path) -> Iterator[Service]:
    found = Service(folder / "home", "--cpu-slots", str(_SLOTS))
    try:
        found.start()
        yield found
    finally:
        found.stop()


def measure(service: Service, setup: Setup, folder: Path) -> Measured:
    """Run the job of ``setup`` to its end; what it wrote is gone afterwards."""
    place = Path(tempfile.mkdtemp(dir=folder))
    told = {
        "megabytes": setup.megabytes, "batch": setup.batch, "rounds": setup.rounds, "ways": json.dumps(setup.ways),
        "way_rounds": setup.way_rounds, "cycle": setup.cycle, "restores": setup.restores, "folder": place,
    }  # fmt: skip
    spec = {
        "name": "bench-checkpoint",
        "code": {"path": str(SCRIPTS)},
        "script": ["save_loop.py", *(str(part) for key, value in told.items() for part in (f"--{key}", value))],
        "world": {"ranks_per_node": setup.ranks, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "determinism": "off",  # it would fill every new tensor, which costs the others more than Ratchet
        "checkpoint": {"every_steps": setup.cycle, "first": "off", "staging": setup.staging, "keep_last": 2},
        "policy": {"backoff": 0.1},
    }
    begin = time.monotonic()
    job = service.client.submit(spec)
    first = attempt_paths(service, job.id, 1)
    try:
        _until_ended(service, job.id, place / "progress.json", last=2 if setup.restores else 1)
        ranks = _read(place, "save", setup.ranks)
        reports = {m["step"]: m for m in spool(first, 0) if m["kind"] == "checkpoint" and m["stall"] is not None}
        print(f"  ran {setup}: {time.monotonic() - begin:.0f} s", flush=True)
        return Measured(
            setup, ranks[0]["nbytes"], ranks[0]["tensors"], _saves(ranks, reports),
            _slowest([rank["limits"] for rank in ranks]), _loads(place, setup), max(rank["trial"] for rank in ranks),
            ranks[0]["busy_cores"],
        )  # fmt: skip
    finally:
        forget(service, job.id, place)


def forget(service: Service, job: str, place: Path) -> None:
    """Remove the job's checkpoints, and ``place``. A job that runs is told to end; who ends the service ends it for certain."""
    with suppress(Exception):  # of a service that has not lived to see it; what the caller raises says more
        service.client.cancel(job)
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(attempt_paths(service, job).root.parents[1] / "checkpoints", ignore_errors=True)


def _until_ended(service: Service, job: str, progress: Path, last: int) -> None:
    """Every attempt to its end: by a kill of its own making but for the last. Raises ``DemoError`` for any other end, and where
    nothing gets on."""
    for number in range(1, last + 1):
        attempt, wanted = attempt_paths(service, job, number), Cause.COMPLETED if number == last else Cause.RANK_KILLED
        seen, end = "", time.monotonic() + _PATIENCE
        while (result := ended(attempt)) is None and time.monotonic() < end:
            time.sleep(0.1)
            if progress.exists() and (now := progress.read_text()) != seen:
                seen, end = now, time.monotonic() + _PATIENCE
        if result is None or result.cause is not wanted:
            told = "did not get on" if result is None else f"ended with {result.cause}: {result.message}"
            raise DemoError(f"attempt {number} {told}\n{logs(attempt)}")


def _read(place: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((place / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def _slowest(of_ranks: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of every round but the first, the longest over the ranks."""
    return {
        name: [max(found) for found in zip(*(rank[name] for rank in of_ranks), strict=True)][1:] for name in of_ranks[0]
    }


def _loads(place: Path, setup: Setup) -> dict[str, list[float]]:
    if not setup.restores:
        return {}
    ranks = _read(place, "restore", setup.ranks)
    seconds = [rank["seconds"] for rank in ranks]
    out = {name: [max(found) for found in zip(*(rank[name] for rank in seconds), strict=True)] for name in seconds[0]}
    return {**out, "first": [max(rank["first"] for rank in ranks)], "joined": [max(rank["joined"] for rank in ranks)]}


def _saves(ranks: list[dict[str, Any]], reports: dict[int, dict[str, Any]]) -> dict[str, Saves]:
    """All ranks saved in the same order; what one rank waited for, all did. ``reports``: Ratchet's own, by step."""
    of_ranks = [rank["saves"] for rank in ranks]
    quiet: dict[int, list[float]] = {}
    cpus: list[dict[int, list[float]]] = [{} for _ in of_ranks]
    for same in zip(*of_ranks, strict=True):
        if same[0]["small"]:
            continue
        quiet.setdefault(same[0]["round"], []).extend(same[0]["quiet"])
        for save, cpu in zip(same, cpus, strict=True):
            cpu.setdefault(save["round"], []).extend(save["quiet_cpu"])
    step = {number: statistics.median(seconds) for number, seconds in quiet.items() if seconds}
    found: dict[str, list[_One]] = {}
    for same in zip(*of_ranks, strict=True):
        number = same[0]["round"]
        stall = max(_stall(save, rank["still"]) for save, rank in zip(same, ranks, strict=True))
        if same[0]["small"]:  # their mean has what comes now and then, as the sum beside the save has
            before = [(statistics.fmean(s["quiet"]), statistics.fmean(s["quiet_cpu"])) for s in same]
        else:
            before = [(step.get(number, 0.0), statistics.median(of[number]) if of.get(number) else 0.0) for of in cpus]
        counts = [len(save["busy"]) for save in same]
        extra = statistics.fmean(sum(s["busy"]) - n * own for s, n, (own, _) in zip(same, counts, before, strict=True))
        cpu = sum(s["cpu"] - n * own for s, n, (_, own) in zip(same, counts, before, strict=True))
        report = reports.get(same[0]["step"], {"stall": None, "seconds": 0.0})
        total, handing = (max(save[key] for save in same) for key in ("total", "handing_over"))
        total = max(total, report["seconds"])  # seen from outside: the manifest's name, before its directory is synced
        one = _One(stall, total, stall + extra, cpu, report["stall"], handing, bool(same[0]["busy"]))
        found.setdefault(same[0]["way"], []).append(one)
    typical = statistics.median(step.values()) if step else 0.0
    return {way: _together(saves, typical) for way, saves in found.items()}


def _stall(save: dict[str, Any], still: dict[str, float]) -> float:
    """Without what the loop stands still for in a step that has no save, too: Ratchet's boundary, and the way to where waiting
    would be measured. Where no step ran beside the save nothing is taken off: behind empty steps, whose caches are warm, these
    take a fraction of what they take behind a real one."""
    seconds: float = save["call"] + save["held"]
    if save["busy"]:
        seconds -= save["waits"] * still["held"] + (still["boundary"] if save["step"] is not None else 0.0)
    return seconds


class _One(NamedTuple):
    stall: float
    total: float
    lost: float
    cpu: float
    told: float | None
    handing_over: float
    beside: bool


def _together(saves: list[_One], step: float) -> Saves:
    later = saves[1:]
    return Saves(
        saves[0].stall, [s.stall for s in later], [s.total for s in later], [s.lost for s in later],
        [s.cpu for s in later], [s.told for s in later], [s.handing_over for s in later], step,
        any(s.beside for s in later),
    )  # fmt: skip
