"""The agent: one small process per attempt and node that starts the ranks, watches them and tells how they ended.

``python -m ratchet_worker.agent LAUNCH_FILE [--node K | --node-from VARIABLE]``. No torch. It outlives the service on purpose,
and its ranks never outlive it. ``result.json`` is the truth about the end; the exit code (``ratchet_contract.exit_codes``) is
for engines that see nothing else. 75 also means: this part of the attempt is or was run by somebody else; nothing was done.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError

from ratchet_contract import environment as names
from ratchet_contract import parent_death
from ratchet_contract.errors import UserError
from ratchet_contract.exit_codes import EXIT_LEASE_LOST, exit_code_of
from ratchet_contract.messages import AttemptResult, LaunchFile, Note, node_rank
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_contract.resume import Base
from ratchet_worker import code_fetch, procs, workdir
from ratchet_worker.agent_files import (
    LaunchRefused,
    agent_file,
    load_launch,
    lock,
    own_session,
    refuse,
    write_result,
)
from ratchet_worker.copies import Copies
from ratchet_worker.files import now, reserve, say, write_atomic
from ratchet_worker.forking import ForkingStarter
from ratchet_worker.launch_env import plan_ranks
from ratchet_worker.log_keeper import LogKeeper
from ratchet_worker.meeting import Meeting, Rendezvous, alone
from ratchet_worker.results import Conclusion, Ended, NotStarted, conclude
from ratchet_worker.spool import Spool
from ratchet_worker.starter import ProcessStarter, Starter
from ratchet_worker.supervised import Timing
from ratchet_worker.supervisor import Supervisor
from ratchet_worker.uplink import Uplink
from ratchet_worker.upload import leave
from ratchet_worker.waking import STOP_SIGNALS

T = TypeVar("T")
_RANK_MODULE: Final = "ratchet_worker.process"  # torch, and nearly all that a rank imports


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ratchet_worker.agent", description="Run one attempt's ranks.")
    parser.add_argument("launch_file", type=Path, help="launch.json of the attempt")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--node", type=int, default=0, help="number of this node, from 0 (default: %(default)s)")
    which.add_argument("--node-from", metavar="VARIABLE", help="environment variable that holds it")
    given = parser.parse_args(argv)
    node = given.node
    if given.node_from is not None:
        told = os.environ.get(given.node_from, "")
        if not (told.isascii() and told.isdigit()):
            parser.error(f"--node-from: {given.node_from} is {told!r}, not the number of a node")
        node = int(told)
    return run(given.launch_file.absolute(), node=node)


def run(launch_file: Path, starter: Starter | None = None, timing: Timing = Timing(), *, node: int = 0) -> int:
    """Run one node's part of the attempt; returns the exit code. Call it in the main thread of a process of its own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the supervisor listens to them
    paths = AttemptPaths(launch_file.parent).node(node)
    held = lock(paths)
    if held is None:
        say(f"{paths.lock_file} is held: another agent runs this attempt")
        return EXIT_LEASE_LOST
    if paths.agent_file.exists() or paths.result_file.exists():
        say(f"{paths.root} was run before; a new try is a new attempt")
        return EXIT_LEASE_LOST
    fence = AttemptPaths(launch_file.parent).fence_file
    if fence.exists():  # looked for behind the lock: who writes it looks for locks and processes afterwards
        say(f"{fence} is there: the attempt is over, and nothing of it is started")
        return EXIT_LEASE_LOST
    own_session()
    write_atomic(paths.agent_file, agent_file().model_dump_json().encode(), durable=True)
    reserve(paths.result_file)
    started_at = now()
    try:
        launch = load_launch(launch_file, node)
    except LaunchRefused as error:
        say(str(error))
        refuse(paths, launch_file, node, error, started_at)
        return exit_code_of(error.cause)
    return _Attempt(launch, starter or _starter(launch), timing, started_at).run()


def _starter(launch: LaunchFile) -> Starter:
    """A process that has touched CUDA cannot be forked, and a single rank has nobody to share its imports with."""
    if launch.resolved.device == "cuda" or len(launch.ranks) == 1:
        return ProcessStarter()
    # Deterministic algorithms have torch import its compiler, which takes a second. Elsewhere user code comes before it, and may
    # set variables that it reads.
    return ForkingStarter([_RANK_MODULE, *(["torch._dynamo"] if launch.spec.determinism != "off" else [])])


class _Attempt:
    """Start, supervision, clean-up, result: each step happens whatever went wrong before it."""

    def __init__(self, launch: LaunchFile, starter: Starter, timing: Timing, started_at: str) -> None:
        self._launch = launch
        self._timing = timing
        self._started_at = started_at
        self._paths = AttemptPaths(Path(launch.attempt_dir))
        self._own = self._paths.node(launch.node)
        self._deadline = time.monotonic() + launch.deadlines.meeting
        self._supervisor = Supervisor(launch, self._paths, starter, timing)
        self._copies = Copies(launch, self._paths)
        self._logs = LogKeeper(launch, self._paths)
        spools = {rank: self._paths.spool(rank) for rank in launch.ranks} | self._copies.spools() | self._logs.spools()
        self._meeting = Meeting(launch) if launch.spec.world.nodes > 1 else None
        self._uplink = Uplink(launch, spools, self._supervisor, period=timing.report, meeting=self._meeting)

    def run(self) -> int:
        ends: list[Ended] = []
        try:
            procs.become_subreaper()
            self._supervisor.take_signals()
            parent_death.end_with_parent(os.environ)
            self._supervisor.insist()
            self._logs.start()
            self._start()
            self._uplink.start()
            self._copies.start()
            ends = self._supervisor.run()
            conclusion = conclude(ends, self._supervisor.evidence)
        except NotStarted as over:
            conclusion = over.conclusion
        except UserError as error:
            conclusion = Conclusion(Cause.USER_ERROR, None, None, error.detail)
        except Exception as error:
            traceback.print_exc()
            with suppress(Exception):
                ends = self._supervisor.finish()
            conclusion = _crashed(error, any_rank=bool(ends))
        self._clean_up()
        self._logs.finish()
        fenced = self._supervisor.evidence.fenced is not None
        self._copies.finish(conclusion.cause, fenced, self._supervisor.grace_left)
        result = self._result(conclusion, ends)
        self._tell(result)
        return exit_code_of(result.cause)

    def _start(self) -> None:
        """Meet the other nodes, start the ranks, let go of the rendezvous store's socket: it lives and dies with rank 0."""
        code, work = self._launch.code_dir, Path(self._launch.workdir)
        digest = code_fetch.provide(self._launch, self._patience, self._supervisor.insist)
        self._deadline += self._copies.fetch(self._uplink, self._supervisor.wait_for)
        if self._launch.node == 0:  # before the others hear of it: where they share its disk, they find it
            self._prepare(code, work, digest)
        rendezvous = self._meet()
        with rendezvous.listener or nullcontext():
            if self._launch.node != 0:
                self._prepare(code, work, digest)
            plans = plan_ranks(self._launch, self._paths, rendezvous, inherited=os.environ, code_digest=digest)
            try:
                self._supervisor.start(plans)
            except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
                python = self._launch.spec.python
                if python is None or error.filename != self._launch.resolved.python:
                    raise
                self._supervisor.finish()
                raise UserError(
                    f"the interpreter {error.filename} of the spec (python) cannot be run: {error}"
                ) from None

    def _prepare(self, code: str | None, work: Path, digest: str | None) -> None:
        """``digest``: of code that lies on the nodes."""
        left = workdir.prepare(None if code is None else Path(code), work, digest or self._launch.resolved.code_digest)
        if left:
            names_left = ", ".join(left[:20]).encode("utf-8", "replace").decode() + " ..." * (len(left) > 20)
            text = (
                "the job goes on with other code; of its files in the working directory, those that the job has changed are left "
                f"as they are: {names_left}. Modules are imported from the new code"
            )
            say(text)
            spool = Spool(self._paths.node_spool(self._launch.node))
            spool.append(Note(rank=node_rank(self._launch.node), at=now(), type="work-kept", message=text[:4000]))
            spool.close()

    def _meet(self) -> Rendezvous:
        if self._meeting is None:
            return alone(self._launch.world_size)
        told = os.environ.get(names.NODE_ADDRESS)
        return self._meeting.attend(told, self._patience, self._uplink.start)

    def _patience(self, done: Callable[[], T | None]) -> T | None:
        return self._supervisor.wait_for(done, self._deadline)

    def _clean_up(self) -> None:
        left = procs.sweep(names.NODE_DIR, str(self._own.root))
        if left:
            say(f"processes {left} do not die of SIGKILL")
        procs.remove_tree(self._own.tmp)

    def _result(self, conclusion: Conclusion, ends: list[Ended]) -> AttemptResult:
        base = self._base()
        last = max((e.end.last_step for e in ends), default=0) or (base.step if base is not None else 0)
        return AttemptResult(
            job_id=self._launch.job_id,
            epoch=self._launch.epoch,
            node=self._launch.node,
            cause=conclusion.cause,
            rank=conclusion.rank,
            exit_code=conclusion.exit_code,
            message=conclusion.message and conclusion.message + self._supervisor.evidence.aborts,
            last_step=last,
            base=base,
            secondary=conclusion.secondary,
            began_at=conclusion.began_at,
            started_at=self._started_at,
            stop_at=self._supervisor.stop_at,
            ended_at=now(),
            ranks=[e.end for e in ends],
            pace=self._supervisor.pace,
        )

    def _base(self) -> Base | None:
        try:
            return Base.model_validate_json(self._paths.base_file.read_bytes())
        except (OSError, ValidationError):
            return None

    def _tell(self, result: AttemptResult) -> None:
        """The disk first; then the service, which reads the disk anyway when it does not hear of it."""
        say(f"ended: {result.cause}: {result.message}")
        write_result(self._own, result)
        if self._supervisor.evidence.fenced is None:
            self._uplink.start()
            told = self._uplink.finish(result, self._timing.delivery)
            say("the service has the result" if told else "the service was not reached; the result lies on the disk")


def _crashed(error: Exception, *, any_rank: bool) -> Conclusion:
    cause = Cause.UNKNOWN if any_rank else Cause.LAUNCHER_ERROR
    return Conclusion(cause, None, None, f"the agent failed: {type(error).__name__}: {error}; see agent.log")


if __name__ == "__main__":
    leave(main())
