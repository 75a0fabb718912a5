"""One start, one kill, one restart of a training script on two ranks: by ``torchrun``, or as a job of Ratchet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import httpx

from benchmarks.processes import attempt_paths, ended, logs
from examples.demo.processes import DemoError, Service, living, spool
from ratchet_contract.paths import AttemptPaths

T = TypeVar("T")
SCRIPTS: Final = Path(__file__).with_name("scripts")
RANKS: Final = 2
STEPS_BEFORE_KILL: Final = 60
EVERY_STEPS: Final = 50  # so that a Session has a checkpoint to come back to
_PATIENCE: Final = 120.0  # seconds
_RESTART_PATIENCE: Final = 40.0
_PERIOD: Final = 0.005  # seconds between two looks at a file


class Stamp(NamedTuple):
    """A line that a rank wrote. ``at`` in seconds of the monotonic clock, ``unix`` of the other."""

    event: str
    at: float
    unix: float
    pid: int


@dataclass(frozen=True)
class Run:
    """Seconds to the first step, and from the kill to the first step after it; and what they consist of, in order."""

    first: float
    again: float
    first_parts: dict[str, float]
    again_parts: dict[str, float]


def run_torchrun(place: Path) -> Run:
    """``torchrun --standalone --max-restarts 3 --nproc-per-node 2 plain.py``. ``place``: an empty directory."""
    # With --master-port instead of --standalone, restarted ranks use the dead group's store: most restarts failed or hung.
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--max-restarts", "3"]
    command += ["--nproc-per-node", str(RANKS), str(SCRIPTS / "plain.py")]
    env = {**os.environ, "BENCH_STAMPS": str(place / "stamps"), "OMP_NUM_THREADS": "1"}
    # torchrun's default shares its rendezvous store with the ranks: restarted ones may find a dead rank's address there, fail to
    # connect, and be restarted until none is left. With stores of their own they come back.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (place / "torchrun.log").open("wb") as log:
        begin = _Instant()
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            return _follow(place, begin, [], list, lambda: (place / "torchrun.log").read_text()[-4000:])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def run_ratchet(service: Service, script: str, place: Path, *, parked: int = 0, **where: Any) -> Run:
    """The job of ``script``, or of a task ``module:Class``, under a policy as users get it without saying anything. ``parked``:
    the restart, and the end of the job, wait for this number of parked agents, and until none is starting. ``where``: keys of the
    spec that differ."""
    # not a variable, which would differ in each run: no parked agent would fit
    stamps = str(place / "stamps")
    task = (
        {"task": {"entrypoint": script, "args": {"place": stamps}}} if ":" in script else {"script": [script, stamps]}
    )
    spec = {
        "name": "bench-startup",
        "code": {"path": str(SCRIPTS)},
        "world": {"ranks_per_node": RANKS, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "checkpoint": {"every_steps": EVERY_STEPS, "first": "off"},
        **task,
        **where,
    }

    def ready() -> None:
        if parked:
            _wait(lambda: _all_ready(service, parked), lambda: service.log.read_text()[-4000:])

    begin = _Instant()
    job = service.client.submit(spec)
    answered = ("answer to the POST", time.time())
    first, second = attempt_paths(service, job.id, 1), attempt_paths(service, job.id, 2)
    try:
        return _follow(
            place, begin, [answered], lambda: _landmarks(first), lambda: logs(first) + logs(second),
            lambda: [("attempt ended", first.result_file.stat().st_mtime), *_landmarks(second)], ready,
        )  # fmt: skip
    finally:
        with suppress(DemoError):
            ready()  # for the next job
        service.client.cancel(job.id)
        _wait(lambda: ended(second) is not None and not living(service.home), lambda: logs(second))


def _all_ready(service: Service, number: int) -> bool:
    """True if at least ``number`` agents are parked, the one for the running attempt's successor among them."""
    view = httpx.get(f"{service.url}/v1/fleet?days=1").raise_for_status().json()["parked"]
    return view["ready"] >= number and view["starting"] == 0


class _Instant:
    """Now, on both clocks."""

    def __init__(self) -> None:
        self.at, self.unix = time.monotonic(), time.time()


Landmark = tuple[str, float]
"""A name and Unix seconds."""


def _landmarks(attempt: AttemptPaths) -> list[Landmark]:
    """What an attempt's files tell of its way to the script's first line."""
    started = next(message["at"] for message in spool(attempt, 0) if message["kind"] == "started")
    return [
        ("launch file", attempt.launch_file.stat().st_mtime),
        ("agent", attempt.agent_file.stat().st_mtime),
        ("rank with torch", datetime.fromisoformat(started).timestamp()),
    ]


def _follow(
    place: Path,
    begin: _Instant,
    before: list[Landmark],
    landmarks: Callable[[], list[Landmark]],
    tell: Callable[[], str],
    after_kill: Callable[[], list[Landmark]] | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Run:
    """Wait for steps, kill rank 1, wait for steps of the next process."""
    old = _wait(lambda: _with_steps(place, 0, STEPS_BEFORE_KILL, not_of=0), tell)
    ready()
    victim = _wait(lambda: _with_steps(place, 1, 1, not_of=0), tell)[0].pid
    kill = _Instant()
    os.kill(victim, signal.SIGKILL)
    new = _wait(lambda: _with_steps(place, 0, 1, not_of=old[0].pid), tell, _RESTART_PATIENCE)
    return Run(
        first=_first_step(old).at - begin.at,
        again=_first_step(new).at - kill.at,
        first_parts=_differences(begin, [*before, *landmarks(), *_of_script(old)]),
        again_parts=_differences(kill, [*(after_kill() if after_kill is not None else []), *_of_script(new)]),
    )


def _with_steps(place: Path, rank: int, count: int, *, not_of: int) -> list[Stamp] | None:
    """What the newest process of ``rank`` wrote, once it has done ``count`` steps; else, or if its pid is ``not_of``, None."""
    try:
        lines = (place / f"stamps.{rank}").read_text().splitlines()
    except FileNotFoundError:
        return None
    found = [Stamp(a, int(b) / 1e9, int(c) / 1e9, int(d)) for a, b, c, d in (line.split() for line in lines)]
    own = [stamp for stamp in found if stamp.pid == found[-1].pid]
    steps = sum(stamp.event == "step" for stamp in own)
    return own if steps >= count and own[0].pid != not_of else None


def _first_step(stamps: Iterable[Stamp]) -> Stamp:
    return next(stamp for stamp in stamps if stamp.event == "step")


_NAMES: Final = {
    "script": "script's first line", "torch": "its imports", "group": "process group", "ddp": "model and DDP",
    "step": "first step",
}  # fmt: skip


def _of_script(stamps: list[Stamp]) -> list[Landmark]:
    firsts = {stamp.event: stamp.unix for stamp in reversed(stamps)}
    return [(name, firsts[event]) for event, name in _NAMES.items()]


def _differences(begin: _Instant, landmarks: list[Landmark]) -> dict[str, float]:
    out, last = {}, begin.unix
    for name, unix in landmarks:
        out[name], last = unix - last, unix
    return out


def _wait(happened: Callable[[], T | None], tell: Callable[[], str], patience: float = _PATIENCE) -> T:
    end = time.monotonic() + patience
    while not (value := happened()):
        if time.monotonic() > end:
            raise DemoError(f"waited {patience:.0f} s for a training process, in vain\n{tell()}")
        time.sleep(_PERIOD)
    return value
