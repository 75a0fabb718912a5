"""A job without torch: the real agent, a rank that really commits checkpoints, resumes along its lineage and obeys stops.

``python fake_trainer.py agent LAUNCH_FILE [--node K]`` is the agent, ``python fake_trainer.py rank`` the rank it starts.
What the rank does is in the spec's env, TRAINER (JSON): steps, every (steps between checkpoints), pause (seconds per step),
pauses (those of single ranks), redone (true: it tells of steps done again), metrics (true: rank 0 reports two series), keep
(true: it deletes as a worker does, by checkpoint.keep_last), chain (see ``Rank._follow``); per attempt under "epochs": at (step),
after (a file: it waits at that step until the file is there, 120 s at most) and do: wait (until it is to stop), kill (itself),
kill-agent, raise, user-error, exit-N, mute (checkpoints are committed but not reported), deaf (stops are ignored), child (a
sleeping process in a session of its own, then kill-agent), train on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.paths import AttemptPaths, JobPaths
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import (
    CheckpointCommitted,
    CheckpointDeleted,
    LaunchFile,
    Metrics,
    Progress,
    RankResult,
    RedoneSteps,
    Training,
)
from ratchet_store.read.checkpoint_reader import read_state
from ratchet_store.read.find_base import find_base
from ratchet_store.retention.attempt_retention import Keeper
from ratchet_worker.agent.main import run
from ratchet_worker.agent.rank_starter import ProcessStarter, RankPlan, RankProcess
from ratchet_worker.ipc import child_processes, log_lines
from ratchet_worker.ipc.log_lines import now
from ratchet_worker.ipc.progress_counter import Stage, StepCounter
from ratchet_worker.ipc.report_spool import Spool
from ratchet_worker.ipc.result_files import write_rank_result
from tests.support import clock_jumps
from tests.support.checkpoints import manifest_of, write_ranks
from tests.support.one_shot_writers import commit

AGENT = (sys.executable, "-P", "-m", "tests.support.fake_trainer", "agent")


class TrainerStarter:
    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        return ProcessStarter().start(
            [replace(plan, command=[plan.command[0], "-P", __file__, "rank"]) for plan in plans]
        )


def wait_for_file(file: Path) -> None:
    end = time.monotonic() + 120
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file} was not made within 120 s")
        time.sleep(0.01)


class Rank:
    """One rank; rank 0 alone commits."""

    def __init__(self) -> None:
        self.launch = LaunchFile.model_validate_json(Path(os.environ["RATCHET_LAUNCH_FILE"]).read_bytes())
        self.rank = int(os.environ["RANK"])
        self.paths = AttemptPaths(Path(self.launch.attempt_dir))
        self.job = JobPaths(Path(self.launch.job_root))
        self.plan: dict[str, Any] = json.loads(os.environ.get("TRAINER", "{}"))
        self.faults: dict[str, Any] = self.plan.get("epochs", {}).get(str(self.launch.attempt), {})
        self.counter = StepCounter.create(self.paths.counter(self.rank))
        self.spool = Spool(self.paths.spool(self.rank))
        self.keeper = Keeper(self.job.checkpoints, self.launch.spec.checkpoint, self.launch.attempt)
        self.state = 0  # what the saved tensors are made from

    def train(self) -> None:
        steps, every = self.plan.get("steps", 30), self.plan.get("every", 10)
        base = self._resume()
        parent = base
        if self.rank == 0:
            write_atomic(self.paths.base_file, base.model_dump_json().encode(), durable=True)
            self.spool.append(Training(rank=0, at=now(), base=base, total_steps=steps))
        if self.plan.get("redone") and base.step:
            told = RedoneSteps(rank=self.rank, at=now(), world_size=1, steps=5, compared=5, equal=5)
            self.spool.append(told)
        self.counter.enter_stage(Stage.TRAINING)
        for step in range(base.step + 1, steps + 1):
            self.counter.start_step(step)
            time.sleep(self.plan.get("pauses", {}).get(str(self.rank), self.plan.get("pause", 0.01)))
            self.counter.finish_step(step)
            self._update_state(step)
            if self.plan.get("metrics") and self.rank == 0:
                self.spool.append(Metrics(rank=0, at=now(), step=step, values={"loss": 1 / step, "nan": math.nan}))
            if step % 5 == 0:
                self.spool.append(Progress(rank=self.rank, at=now(), step=step, total_steps=steps))
            if step % every == 0 or step == steps:
                parent = self._commit(step, parent, "end" if step == steps else "schedule", finished=step == steps)
            if step == self.faults.get("at"):
                if "after" in self.faults:
                    wait_for_file(Path(self.faults["after"]))
                self._misbehave(self.faults["do"], step)
            cause = None if self.faults.get("do") == "deaf" else self._requested_stop()
            if cause is not None:
                if step % every and step != steps:
                    self._commit(step, parent, "stop", finished=False)
                self._finish(cause, 143, step)
        self._finish("completed", 0, steps)

    def _resume(self) -> Base:
        found, _ = find_base(
            self.job.checkpoints, self.job.quarantine, self.launch.lineage, expected_job_id=self.launch.job_id
        )
        if found is not None:
            if "chain" in self.plan:
                self.state = read_state(self.job.checkpoint(found.step, found.attempt), found, 0)["seed"]
            return found.base
        fork = self.launch.fork
        return Base() if fork is None else Base(step=fork.step, attempt=fork.attempt, digest=fork.digest)

    def _update_state(self, step: int) -> None:
        """What is saved is a function of the step alone. With ``chain``, the path of a directory, it is one of all steps in their
        order since step 0, whatever attempts made them, as trained parameters are; and each is noted there with its instant."""
        if "chain" not in self.plan:
            self.state = step
            return
        self.state = int.from_bytes(hashlib.blake2b(f"{self.state}/{step}".encode(), digest_size=6).digest())
        if self.rank == 0:
            with (Path(self.plan["chain"]) / f"{self.launch.job_id}.log").open("ab", buffering=0) as log:
                log.write(b"%d %d %d\n" % (self.launch.attempt, step, time.monotonic_ns()))

    def _commit(self, step: int, parent: Base, reason: Any, *, finished: bool) -> Base:
        if self.rank != 0:
            return parent
        began, attempt = time.monotonic(), self.launch.attempt
        directory = self.job.checkpoint(step, attempt)
        files, tensors = write_ranks(directory, world_size=1, seed=self.state)
        manifest: Manifest = manifest_of(step, attempt, files, tensors, parent=parent, job_id=self.launch.job_id)
        sealed = commit(directory, manifest.model_copy(update={"reason": reason, "finished": finished}))
        if self.faults.get("do") != "mute":
            self.spool.append(
                CheckpointCommitted(
                    rank=0, at=now(), step=step, attempt=attempt, digest=sealed.digest, size=sealed.size, files=1,
                    seconds=time.monotonic() - began, reason=reason, parent=parent, finished=finished,
                )
            )  # fmt: skip
        if self.plan.get("keep"):
            for gone, of in self.keeper.on_committed(sealed).deleted:
                self.spool.append(CheckpointDeleted(rank=0, at=now(), step=gone, attempt=of))
        return sealed.base

    def _requested_stop(self) -> str | None:
        try:
            wish = json.loads(self.paths.control_file.read_bytes())
        except (OSError, ValueError):
            return None
        return None if wish["desired"] == "run" else str(wish["cause"])

    def _misbehave(self, what: str, step: int) -> None:
        if what == "child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
        if what == "wait":
            while self._requested_stop() is None:
                time.sleep(0.01)
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what in ("kill-agent", "child", "mute"):
            os.kill(int(os.environ["RATCHET_AGENT_PID"]), signal.SIGKILL)
            time.sleep(3600)
        elif what == "raise":
            self._finish("exception", 1, step, "ValueError: wrong")
        elif what.startswith("exit-"):
            os._exit(int(what.removeprefix("exit-")))
        elif what == "user-error":
            self._finish("user-error", 78, step, "no module named mine")

    def _finish(self, cause: str, code: int, step: int, message: str | None = None) -> NoReturn:
        result = RankResult(rank=self.rank, cause=Cause(cause), at=now(), last_step=step, message=message)
        self.spool.close()
        write_rank_result(self.paths.rank_result(self.rank), result)
        os._exit(code)


if __name__ == "__main__":
    if "RATCHET_ATTEMPT_DIR" in os.environ:  # some tests start agents themselves
        clock_jumps.install(log_lines, Path(os.environ["RATCHET_ATTEMPT_DIR"]) / clock_jumps.FILE)
    if sys.argv[1] == "agent":
        sys.exit(run(Path(sys.argv[2]), TrainerStarter(), node=int(sys.argv[4]) if sys.argv[3:] else 0))
    child_processes.die_with_parent(int(os.environ["RATCHET_AGENT_PID"]))
    if "PLANTED" in os.environ:
        from tests.support.chaos.planted_faults import plant

        plant(os.environ["PLANTED"])
    Rank().train()
