"""A job run by real agents and ranks, attempt after attempt, without the service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from ratchet_contract.checkpoint.resume_report import Base, ResumeReport, Segment
from ratchet_contract.paths import AttemptPaths, HomePaths, JobPaths
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import AttemptResult, Control, LaunchFile, RankMessage, Resumed
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_worker.ipc.control_file import write_control
from ratchet_worker.ipc.progress_counter import CounterReader, Reading
from tests.support.fork_server import RANKS, Interpreter, Program
from tests.support.server import processes_below, rank_pid, wait_for, wait_for_checkpoint

RESOLVED = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=sys.executable)
_MESSAGE: TypeAdapter[RankMessage] = TypeAdapter(RankMessage)


def wait_freeze(
    paths: AttemptPaths, number: int, world_size: int = 2, deadline: float = 30, proc: Path = Path("/proc")
) -> None:
    """Every rank has published where it is in freeze round ``number`` (from 0), and begins nothing that was not begun.
    ``proc``: as the ranks see it."""
    from torch.distributed import TCPStore  # the fixture is every test's, torch is not

    env = (proc / str(rank_pid(paths, 0)) / "environ").read_bytes().split(b"\0")
    port = next(int(pair.split(b"=")[1]) for pair in env if pair.startswith(b"MASTER_PORT="))
    store = TCPStore("127.0.0.1", port, is_master=False)
    keys = [f"freeze/{number}/{rank}" for rank in range(world_size)]
    log = paths.log(0)
    wait_for(lambda: store.check(keys), f"all ranks to be in freeze {number}\n{log.read_text()[-4000:]}", deadline)


class Job:
    """``spec`` as a user writes it (``name`` may be left out); ``code``: the code snapshot. ``afresh``: agents and ranks in
    interpreters of their own, and not in ``interpreters``."""

    def __init__(
        self,
        home: Path,
        spec: dict[str, Any],
        code: Path | None = None,
        *,
        job_id: str = "job-1",
        afresh: bool = False,
        interpreters: Interpreter = RANKS,
    ) -> None:
        self.home, self.job_id = HomePaths(home), job_id
        self.paths: JobPaths = self.home.job(job_id)
        self.code = code
        self.spec = {"name": "test", "world": {"ranks_per_node": 2, "device": "cpu"}, **spec}
        self.attempts: list[Attempt] = []
        self._afresh, self._interpreters = afresh, interpreters

    def launch(self, *, spec: dict[str, Any] | None = None, **launch: Any) -> Attempt:
        """Start the next attempt. ``spec`` changes keys of the spec for this and later attempts."""
        self.spec = {**self.spec, **(spec or {})}
        attempt = Attempt(self, len(self.attempts) + 1, launch)
        self.attempts.append(attempt)
        return attempt

    def run_killed(self, times: int) -> None:
        """To the end: of each of the first attempts, as many as ``times``, a rank is killed."""
        for wanted in [Cause.RANK_KILLED] * times + [Cause.COMPLETED]:
            attempt = self.launch()
            assert attempt.wait(180).cause is wanted, attempt.logs()

    def start_agent(self, paths: AttemptPaths) -> subprocess.Popen[bytes] | Program:
        command = [sys.executable, "-P", "-m", "ratchet_worker.agent", str(paths.launch_file)]
        with paths.agent_log.open("ab") as log:
            if self._afresh:
                return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            return self._interpreters.start(command, log.fileno())

    def lineage(self) -> list[Segment]:
        """What the attempts so far built on one another, newest first; each ends where the next one began."""
        out: list[Segment] = []
        until: int | None = None
        wanted: int | None = None
        for attempt in reversed(self.attempts):
            base = attempt.base()
            if base is None or (wanted is not None and attempt.attempt != wanted):
                continue
            out.append(Segment(attempt=attempt.attempt, after_step=base.step, until_step=until))
            if base.attempt is None:
                break
            wanted, until = base.attempt, base.step
        return out

    def checkpoints(self) -> list[str]:
        """Ids of what is committed, oldest first."""
        return sorted(p.parent.name for p in self.paths.checkpoints.glob("*/MANIFEST.json"))

    def newest(self) -> Path:
        return self.paths.checkpoints / self.checkpoints()[-1]

    def close(self) -> None:
        for attempt in self.attempts:
            attempt.close()


class Attempt:
    """One running (or ended) attempt."""

    def __init__(self, job: Job, attempt: int, launch: dict[str, Any]) -> None:
        self.job, self.attempt = job, attempt
        self.paths: AttemptPaths = job.paths.attempt(attempt)
        spec = parse_spec(job.spec)
        self.world_size = spec.world.size
        lineage = job.lineage()
        self.launch = LaunchFile(
            job_id=job.job_id,
            attempt=attempt,
            world_size=self.world_size,
            ranks=list(range(self.world_size)),
            spec=spec,
            job_root=str(job.paths.root),
            attempt_dir=str(self.paths.root),
            code_dir=None if job.code is None else str(job.code),
            workdir=str(job.paths.work_dir),
            report_token="none",
            service_file=str(job.home.service_file),
            **{"lineage": lineage, "resolved": RESOLVED, "save_seconds": 0.0, **launch},
        )
        self.paths.root.mkdir(parents=True)
        self.paths.launch_file.write_text(self.launch.model_dump_json())
        self.agent = job.start_agent(self.paths)

    # --- what it does --------------------------------------------------------------------------------------------------

    def wait(self, deadline: float = 60) -> AttemptResult:
        """Its result, after the agent has exited."""
        wait_for(lambda: self.agent.poll() is not None, f"attempt {self.attempt} to end\n{self.logs()}", deadline)
        return AttemptResult.model_validate_json(self.paths.result_file.read_bytes())

    def reading(self, rank: int = 0) -> Reading | None:
        return CounterReader(self.paths.counter(rank)).read()

    def wait_step(self, step: int, rank: int = 0) -> None:
        def reached() -> bool:
            assert self.agent.poll() is None, f"it ended before step {step}\n{self.logs()}"
            reading = self.reading(rank)
            return reading is not None and reading.finished >= step

        wait_for(reached, f"rank {rank} to finish step {step}", 60, 0.02)
        if isinstance(self.launch.spec.checkpoint.every_steps, int):
            wait_for_checkpoint(self.paths, step)  # what was due by then is written beside the training

    def wait_log(self, text: str, rank: int = 0) -> None:
        path = self.paths.log(rank)
        wait_for(lambda: path.exists() and text in path.read_text(), f"{text!r} in the log of rank {rank}", 60, 0.02)

    def control(self, **fields: Any) -> None:
        """What the agent would write when the service wishes it."""
        write_control(self.paths.control_file, Control(**fields))

    def wait_freeze(self, number: int) -> None:
        """See the function of that name."""
        wait_freeze(self.paths, number, self.world_size)

    def pid(self, rank: int) -> int:
        for pid in processes_below(self.paths.root):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == f"rank-{rank}\n" and os.getsid(pid) == pid:
                    return pid
        raise AssertionError(f"rank {rank} is not alive\n{self.logs()}")

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), number)

    # --- what it left --------------------------------------------------------------------------------------------------

    def base(self) -> Base | None:
        if not self.paths.base_file.exists():
            return None
        return Base.model_validate_json(self.paths.base_file.read_bytes())

    def messages(self, rank: int = 0, kind: str | None = None) -> list[Any]:
        return [m for m in self.messages_in(self.paths.spool(rank)) if kind is None or m.kind == kind]

    def messages_in(self, spool: Path) -> list[Any]:
        return [_MESSAGE.validate_json(line) for line in spool.read_text().splitlines()]

    def notes(self, rank: int = 0) -> list[Any]:
        """What a rank notes of the training; of the file system that the tests' files lie on there may be a note, too."""
        return [note for note in self.messages(rank, kind="note") if note.type != "file-system"]

    def report(self) -> ResumeReport:
        (message,) = self.messages(kind="resumed")
        assert isinstance(message, Resumed)
        return message.report

    def metrics(self) -> dict[int, dict[str, float]]:
        """Values by step; a step's several messages are merged."""
        out: dict[int, dict[str, float]] = {}
        for message in self.messages(kind="metrics"):
            out.setdefault(message.step, {}).update(message.values)
        return out

    def logs(self) -> str:
        """The agent's log and the ends of the ranks' logs."""
        paths = [self.paths.agent_log, *(self.paths.log(r) for r in range(self.world_size))]
        return "\n".join(f"--- {p.name}\n{p.read_text()[-4000:]}" for p in paths if p.exists())

    def close(self) -> None:
        if self.agent.poll() is None:
            self.agent.kill()
        self.agent.wait(10)
        for pid in processes_below(self.paths.root):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes_below(self.paths.root), "the attempt's processes to go", 10)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs that a test puts in; afterwards nothing of them is alive."""
    made: list[Job] = []
    yield made
    for job in made:
        job.close()
