"""One rank of ``make bench ONLY=checkpoint``: a Session trains, and its state is saved in one way after the other, by turns.

A save of Ratchet's comes by its schedule: at the end of every ``--cycle``-th step. Those between are used up by steps without a
body once all other ways have had their turn. A round has two cycles: in the first the saves happen beside steps as a training has
them, in the second there is nothing to hide them: ``optimizer.step()`` follows at once, then the loop waits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from restore_ways import measure_restore
from save_state import Copy, buffer_for, net, width_of
from save_ways import WAYS, Pending, Way, World, end_checkpoint_process, remove, write_synced

from ratchet_contract import environment
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_worker.session import Session

RATCHET = "Ratchet"
BARE = "Ratchet, nothing to hide it"
FRESH_PROCESS = "dcp.async_save, process"
KEPT = ("torch.save", "dcp.save")  # what they saved last is loaded in the next attempt
_QUIET = 3  # steps without a save before each way
_LONGEST = 60  # steps that may pass until a save is durable; then the loop waits


@dataclass
class Save:
    """Seconds. ``call`` and ``gate``: the loop stood still; ``total``: until all bytes were durable, from outside; ``quiet`` and
    ``busy``: steps before, and until it was durable, without ``call`` and ``gate``. ``step``: of a save of Ratchet's,
    ``cpu``: what its ``call`` took of the loop's thread."""

    way: str
    round: int
    call: float
    gate: float = 0.0
    total: float = 0.0
    quiet: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    step: int | None = None
    cpu: float = 0.0


class Loop:
    """Steps of a Session. All ranks end a step together."""

    def __init__(self, session: Session, world: World, batch: torch.Tensor, cycle: int) -> None:
        self._session, self._world, self._batch, self._cycle = session, world, batch, cycle
        self._agreed = torch.ones(1, dtype=torch.int64)
        self._steps = session.steps()
        next(self._steps)
        self._entered = 0.0
        # Behind every hook that Ratchet has put before the parameters change: what passes until here is its waiting.
        world.optimizer.register_step_pre_hook(self._enter)
        self.gate = self.boundary = self.boundary_cpu = 0.0

    def _enter(self, *_: object) -> None:
        self._entered = time.perf_counter()

    def step(self, pending: Pending | None = None, *, done: bool = True) -> tuple[float, bool]:
        """One training step: its seconds but for ``gate`` and ``boundary``, and whether all ranks were ``done`` with it."""
        begin = time.perf_counter()
        torch.nn.functional.mse_loss(self._world.ddp(self._batch), self._batch).backward()
        self.update(pending)
        self._world.optimizer.zero_grad()
        all_done = self.agree(done)
        seconds = time.perf_counter() - begin - self.gate
        self.leave()
        return seconds, all_done

    def update(self, pending: Pending | None = None) -> None:
        begin = time.perf_counter()
        if pending is not None:
            pending.gate()
        self._world.optimizer.step()
        self.gate = self._entered - begin

    def agree(self, done: bool = True) -> bool:
        """All ranks come here; are all of them done?"""
        self._agreed.fill_(int(done))
        dist.all_reduce(self._agreed, op=dist.ReduceOp.MIN)
        return bool(self._agreed.item())

    def leave(self) -> None:
        """The step boundary."""
        begin, cpu = time.perf_counter(), time.thread_time()
        next(self._steps)
        self.boundary, self.boundary_cpu = time.perf_counter() - begin, time.thread_time() - cpu

    def to_the_last_of_a_cycle(self) -> None:
        """Empty steps, until a save is due at the end of the open one."""
        while (self._session.step + 1) % self._cycle:
            self.leave()
        self.agree()


class Rounds:
    """All saves of one job, on one rank."""

    def __init__(self, session: Session, loop: Loop, world: World, names: list[str], folder: Path) -> None:
        tensors = list(world.tensors().values())
        buffer = buffer_for(tensors)
        self._session, self._loop, self._world, self._folder = session, loop, world, folder
        self.all, self.share = Copy(tensors, buffer), Copy(tensors, buffer, world.rank, world.ranks)
        self._ways: dict[str, Way] = {name: WAYS[name](world, self.share) for name in names}
        launch = LaunchFile.model_validate_json(Path(os.environ[environment.LAUNCH_FILE]).read_bytes())
        self._checkpoint = lambda step: JobPaths(Path(launch.job_root)).checkpoint(step, launch.epoch)
        self.saves: list[Save] = []
        self.limits: dict[str, list[float]] = {"copy of all": [], "copy of the share": [], "write of the share": []}

    def run(self, number: int, last: bool) -> None:
        names = list(self._ways)
        turned = names[number % len(names) :] + names[: number % len(names)] if names else []
        for name in turned:
            self._turn(name, number, keep=last and name in KEPT)
            if number == 0 and name == FRESH_PROCESS:
                end_checkpoint_process()  # so that the other way with a process has a first save, too
        self._scheduled(number)
        self._bare(number)
        self._limits()

    def _turn(self, name: str, number: int, *, keep: bool) -> None:
        loop, place = self._loop, self._folder / name.replace(" ", "-").replace(",", "")
        if self._world.rank == 0:
            remove(place)
        quiet = [loop.step()[0] for _ in range(_QUIET)]
        begin = time.perf_counter()
        pending = self._ways[name].save(place)
        save = Save(name, number, time.perf_counter() - begin, quiet=quiet)
        if not loop.agree(pending.done()):  # else nothing runs beside it
            self._beside(save, pending, pending.done)
        assert pending.durable is not None
        save.total = pending.durable - begin
        self.saves.append(save)
        loop.agree()
        if self._world.rank == 0 and not keep:
            for path in self._folder.glob(f"{place.name}*"):
                remove(path)

    def _beside(self, save: Save, pending: Pending | None, done: Callable[[], bool]) -> None:
        """Train until the save is durable on all ranks, a step at least."""
        all_done = False
        while not all_done and len(save.busy) < _LONGEST:
            seconds, all_done = self._loop.step(pending, done=done())
            save.busy.append(seconds)
            save.gate += self._loop.gate
        _wait_for(done)

    def _scheduled(self, number: int) -> None:
        loop = self._loop
        quiet = [loop.step()[0] for _ in range(_QUIET)]
        loop.to_the_last_of_a_cycle()
        manifest = self._due()
        quiet.append(loop.step()[0])  # the boundary at its end saves
        unix, begin = time.time() - loop.boundary, time.perf_counter() - loop.boundary
        save = Save(RATCHET, number, loop.boundary, quiet=quiet, step=self._session.step, cpu=loop.boundary_cpu)
        self._beside(save, None, manifest.exists)
        save.total = manifest.stat().st_ctime - unix
        assert time.perf_counter() - begin >= save.total
        self.saves.append(save)

    def _bare(self, number: int) -> None:
        loop = self._loop
        loop.to_the_last_of_a_cycle()
        manifest = self._due()
        loop.agree()
        unix = time.time()
        loop.leave()
        save = Save(BARE, number, loop.boundary, step=self._session.step, cpu=loop.boundary_cpu)
        loop.update()
        save.gate = loop.gate
        _wait_for(manifest.exists)
        save.total = manifest.stat().st_ctime - unix
        self.saves.append(save)
        loop.agree()

    def _due(self) -> Path:
        path: Path = self._checkpoint(self._session.step + 1) / MANIFEST_NAME
        return path

    def _limits(self) -> None:
        raw = self._folder / f"raw-{self._world.rank}"
        raw.unlink(missing_ok=True)
        for name, work in (
            ("copy of all", self.all),
            ("copy of the share", self.share),
            ("write of the share", lambda: write_synced(raw, self.share.bytes)),
        ):
            self._loop.agree()
            begin = time.perf_counter()
            work()
            self.limits[name].append(time.perf_counter() - begin)


def _wait_for(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, required=True, help="parameters and both averages of AdamW")
    parser.add_argument("--batch", type=int, required=True, help="samples per rank")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--ways", required=True, help="JSON list, of WAYS")
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
        for _ in range(2):
            loop.step()
        rounds = Rounds(session, loop, world, json.loads(args.ways), args.folder)
        for number in range(args.rounds + 1):
            rounds.run(number, last=number == args.rounds)
            if session.rank == 0:
                print(f"round {number} of {args.rounds}", flush=True)
        _write(
            out,
            {
                "saves": [asdict(save) for save in rounds.saves],
                "limits": rounds.limits,
                "nbytes": rounds.all.nbytes,
                "share": rounds.share.nbytes,
                "tensors": len(world.tensors()),
            },
        )
        loop.agree()
        if args.restores and session.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # the next attempt goes on from the last checkpoint


def _write(path: Path, result: dict[str, object]) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(result))
    temporary.rename(path)


if __name__ == "__main__":
    sys.exit(main())
