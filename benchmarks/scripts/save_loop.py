"""One rank of ``make bench ONLY=checkpoint``: a Session trains, and its state is saved in one way after the other, by turns.

A save of Ratchet's comes by its schedule: at the end of every ``--cycle``-th step. Those between are used up by steps without a
body once all other ways have had their turn. Where it copies beside the steps a round has three cycles: in the first the save
happens beside steps as a training has them, in the second beside small steps of computing alone, in the third there is nothing
to hide it: ``optimizer.step()`` follows at once, then the loop waits. Where it copies before them only the last is made, and no
``optimizer.step()`` follows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import xxhash
from restore_ways import measure_restore
from save_state import Copy, buffer_for, net, width_of
from save_steps import Loop, SmallSteps, Step, beside_busy_cores, cpu_seconds
from save_ways import LIMITS, WAYS, Pending, Way, World, end_checkpoint_process, remove, sync, write_synced

from ratchet_contract import env_vars
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_worker.session.session import Session

BESIDE = "Ratchet"
BARE = "Ratchet, nothing to hide it"
SMALL = ", beside small steps"
"""Behind the name of a way: what is trained beside it."""
AT_ONCE = ("torch.save", "dcp.save")
"""Nothing runs beside them. What they saved last is loaded in the next attempt."""


@dataclass
class Save:
    """Seconds. ``call`` and ``held``: the loop stood still; ``total``: until all bytes were durable, from outside.
    ``quiet`` and ``busy``: steps before (small ones: and behind it), and until it was durable, without what they were held.
    ``small``: they were of ``SmallSteps``. ``quiet_cpu``: processor time of the former, ``cpu``: of all that was done from the
    call until the last of ``busy``. ``step`` and ``handing_over``: of a save of Ratchet's, and what its ``call`` took of the
    loop's thread. ``waits``: how often ``held`` was measured."""

    way: str
    round: int
    call: float
    held: float = 0.0
    waits: int = 0
    total: float = 0.0
    quiet: list[float] = field(default_factory=list)
    quiet_cpu: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    cpu: float = 0.0
    step: int | None = None
    handing_over: float = 0.0
    small: bool = False

    def without(self, steps: list[Step]) -> None:
        self.quiet += [step.seconds for step in steps]
        self.quiet_cpu += [step.cpu for step in steps]


class Rounds:
    """All saves of one job, on one rank. ``names``: of ``WAYS``, which have their turn until round ``last`` inclusive, the limit
    in all."""

    def __init__(self, session: Session, loop: Loop, world: World, names: list[str], last: int, folder: Path) -> None:
        self._tensors = list(world.tensors().values())
        self._session, self._loop, self._world, self._folder, self._last = session, loop, world, folder, last
        self._small = SmallSteps(loop)
        self.nbytes, self.tensors = sum(tensor.nbytes for tensor in self._tensors), len(self._tensors)
        self._share = Copy(self._tensors, buffer_for(self.nbytes // world.ranks + 1), world.rank, world.ranks)
        self._ways: dict[str, Way] = {name: WAYS[name](world, self._share) for name in names}
        launch = LaunchFile.model_validate_json(Path(os.environ[env_vars.LAUNCH_FILE]).read_bytes())
        self._overlapped = launch.spec.checkpoint.staging == "overlapped"
        self._kept = launch.spec.checkpoint.keep_last or 0
        self._checkpoint = lambda step: JobPaths(Path(launch.job_root)).checkpoint(step, launch.attempt)
        self.saves: list[Save] = []
        self.still: dict[str, list[float]] = {"held": [], "boundary": []}  # of steps without a save
        self._copies: list[float] = []  # of this round
        names_of_limits = ("copy of the share", "digest of the share", "write of the share", "O_DIRECT write")
        self.limits: dict[str, list[float]] = {name: [] for name in names_of_limits}

    def run(self, number: int) -> None:
        names = [name for name in self._ways if number <= self._last or name in LIMITS]
        shift = number % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            self._turn(name, number)
            if name not in AT_ONCE:
                self._turn(name, number, small=True)
        parts = [lambda: self._bare(number), self._write_limit]
        if self._overlapped:
            parts[:0] = [lambda: self._beside_steps(number), lambda: self._beside_steps(number, small=True)]
        for part in parts[number % len(parts) :] + parts[: number % len(parts)]:  # a disk may be slower behind a write
            part()
        self.limits["copy of the share"].append(statistics.median(self._copies))
        self._copies.clear()

    def _turn(self, name: str, number: int, *, small: bool = False) -> None:
        loop, place = self._loop, self._folder / name.replace(" ", "-").replace(",", "")
        if self._world.rank == 0:
            remove(place)
        before = [] if small else [self._step()]
        self._settle()
        if small:
            before += self._small.quiet()
        begin, cpu = time.perf_counter(), cpu_seconds()
        pending = self._ways[name].save(place)
        save = Save(f"{name}{SMALL}" if small else name, number, time.perf_counter() - begin, small=small)
        save.without(before)
        if not loop.agree(pending.done()):  # else nothing runs beside it
            self._until(save, pending, pending.done)
        save.cpu = cpu_seconds() - cpu
        assert pending.durable is not None
        save.total = pending.durable - begin
        self.saves.append(save)
        loop.agree()
        if small:
            save.without(self._small.quiet())
        if self._world.rank == 0 and not (number == self._last and name in AT_ONCE):
            for path in self._folder.glob(f"{place.name}*"):
                remove(path)

    def _settle(self) -> None:
        """All begin together, and no journal holds what was removed before: the next fsync would have to write it."""
        if self._world.rank == 0:
            sync(self._folder)
        self._loop.agree()

    def _until(self, save: Save, pending: Pending | None, done: Callable[[], bool]) -> None:
        """Train until the save is durable on all ranks, a step at least."""
        steps: Loop | SmallSteps = self._small if save.small else self._loop
        all_done = False
        while not all_done and len(save.busy) < steps.longest:
            step = steps.step(pending, done=done())
            all_done = step.done
            save.busy.append(step.seconds)
            if not save.small:  # which stand still for nothing: they change nothing that is saved
                save.held, save.waits = save.held + self._loop.held, save.waits + 1
        _wait_for(done)

    def _beside_steps(self, number: int, *, small: bool = False) -> None:
        loop = self._loop
        quiet = [] if small else [self._step_and_copy()]
        loop.to_the_last_of_a_cycle()
        manifest = self._due()
        self._settle()
        if small:
            quiet += self._small.quiet()
            loop.leave()
        else:
            quiet.append(loop.step())  # the boundary at its end saves
        unix, begin = time.time() - loop.boundary, time.perf_counter() - loop.boundary
        cpu = cpu_seconds() - loop.boundary_cpu
        save = Save(f"{BESIDE}{SMALL}" if small else BESIDE, number, loop.boundary, small=small)
        save.step, save.handing_over = self._session.step, loop.boundary_cpu
        save.without(quiet)
        self._until(save, None, manifest.exists)
        save.cpu = cpu_seconds() - cpu
        save.total = manifest.stat().st_ctime - unix
        assert time.perf_counter() - begin >= save.total
        if small:
            _wait_for(lambda: len(list(manifest.parents[1].iterdir())) <= self._kept)
            self._settle()
            save.without(self._small.quiet())
        self.saves.append(save)

    def _bare(self, number: int) -> None:
        loop = self._loop
        if not self._overlapped:
            self._step_and_copy()  # a round has two
        self._step()  # so that the caches hold what they hold behind a step
        loop.to_the_last_of_a_cycle()
        manifest = self._due()
        self._settle()
        unix, cpu = time.time(), cpu_seconds()
        loop.leave()
        save = Save(BARE, number, loop.boundary, step=self._session.step, handing_over=loop.boundary_cpu)
        if self._overlapped:
            own = time.thread_time()
            loop.update()
            cpu += time.thread_time() - own  # the optimizer's
            save.held = loop.held
        _wait_for(manifest.exists)
        save.cpu = cpu_seconds() - cpu
        save.total = manifest.stat().st_ctime - unix
        self.saves.append(save)
        loop.agree()

    def _due(self) -> Path:
        path: Path = self._checkpoint(self._session.step + 1) / MANIFEST_NAME
        return path

    def _write_limit(self) -> None:
        raw = self._folder / f"raw-{self._world.rank}"
        self._step_and_copy()
        for name, direct in (("write of the share", False), ("O_DIRECT write", True)):
            raw.unlink(missing_ok=True)
            self._settle()
            self.limits[name].append(self._timed(lambda direct=direct: write_synced(raw, self._share.bytes, direct)))  # type: ignore[misc]
        self._step()  # so that the caches hold something else
        self.limits["digest of the share"].append(self._timed(lambda: xxhash.xxh3_128_digest(self._share.bytes)))

    def _step_and_copy(self) -> Step:
        """A step, and behind it a plain copy, which finds the caches as a save does."""
        step = self._step()
        self._settle()
        self._copies.append(self._timed(self._share))
        return step

    def _step(self) -> Step:
        """One beside which nothing is saved."""
        step = self._loop.step()
        self.still["held"].append(self._loop.held)
        self.still["boundary"].append(self._loop.boundary)
        return step

    def _timed(self, work: Callable[[], object]) -> float:
        self._loop.agree()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


def _wait_for(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, required=True, help="parameters and both averages of AdamW")
    parser.add_argument("--batch", type=int, required=True, help="samples per rank")
    parser.add_argument("--rounds", type=int, required=True, help="behind the first, which is apart")
    parser.add_argument("--ways", required=True, help="JSON list, of WAYS")
    parser.add_argument("--way_rounds", type=int, required=True, help="in how many of the rounds they have their turn")
    parser.add_argument("--cycle", type=int, required=True, help="the spec's checkpoint.every_steps")
    parser.add_argument("--restores", type=int, required=True, help="rounds of loading, by a second attempt; 0: none")
    parser.add_argument("--folder", type=Path, required=True, help="for what others save, and for the results")
    args = parser.parse_args()
    began = time.perf_counter()
    with Session() as session:
        joined = time.perf_counter() - began
        torch.manual_seed(session.rank)
        width = width_of(args.megabytes)
        model = session.wrap(net(width))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        session.register(optimizer=optimizer)
        begin = time.perf_counter()
        session.restore()
        restored = time.perf_counter() - begin
        out = args.folder / f"{'restore' if session.resumed else 'save'}-{session.rank}.json"
        world = World(model, optimizer)
        if session.resumed:
            result = measure_restore(session, world, args.restores, args.folder)
            _write(out, {**result, "joined": joined, "first": restored})
            return
        loop = Loop(session, world, torch.randn(args.batch, width), args.cycle)
        loop.step()
        trial = loop.boundary  # behind the first step, and before the parameters change in the second
        loop.step()
        trial += loop.held
        rounds = Rounds(session, loop, world, json.loads(args.ways), args.way_rounds, args.folder)
        for number in range(args.rounds + 1):
            rounds.run(number)
            if session.rank == 0:
                _write(args.folder / "progress.json", {"rounds": number + 1})
        _write(
            out,
            {
                "saves": [asdict(save) for save in rounds.saves],
                "still": {name: statistics.median(seconds) for name, seconds in rounds.still.items()},
                "limits": rounds.limits,
                "nbytes": rounds.nbytes,
                "tensors": rounds.tensors,
                "trial": trial,
                "busy_cores": beside_busy_cores(loop) if session.world_size == 1 else [],
            },
        )
        end_checkpoint_process()
        loop.agree()
        if args.restores and session.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # the next attempt goes on from the last checkpoint


def _write(path: Path, result: dict[str, object]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(result))
    temporary.rename(path)


if __name__ == "__main__":
    sys.exit(main())
