"""The agent: one process per attempt and node that starts the ranks, watches them and reports how they ended. ``result.json`` is
the authoritative record of the end."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError

from ratchet_contract import env_vars as names
from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import UserError
from ratchet_contract.exit_codes import EXIT_LEASE_LOST, exit_code_of
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause, NoteType
from ratchet_contract.processes import parent_death
from ratchet_contract.protocol.messages import AttemptResult, LaunchFile, Note, node_rank
from ratchet_worker.agent import code_download, environment, working_directory
from ratchet_worker.agent.attempt_files import (
    LaunchRefused,
    agent_file,
    load_launch,
    lock,
    start_session,
    write_refusal,
    write_result,
)
from ratchet_worker.agent.fork_starter import ForkingStarter
from ratchet_worker.agent.log_limits import LogKeeper
from ratchet_worker.agent.memory_checkpoint import MemoryCheckpoint
from ratchet_worker.agent.object_store_sync import ObjectStoreSync
from ratchet_worker.agent.rank_environment import plan_ranks
from ratchet_worker.agent.rank_handle import Timing
from ratchet_worker.agent.rank_starter import ProcessStarter, Starter
from ratchet_worker.agent.rendezvous import NodeRendezvous, Rendezvous, single_node
from ratchet_worker.agent.report_sender import ReportSender
from ratchet_worker.agent.supervisor import Supervisor
from ratchet_worker.agent.wakeup_pipe import STOP_SIGNALS
from ratchet_worker.ipc import child_processes
from ratchet_worker.ipc.disk_reserve import reserve
from ratchet_worker.ipc.log_lines import log_message, now
from ratchet_worker.ipc.report_spool import Spool
from ratchet_worker.ipc.result_files import Conclusion, Ended, NotStarted, conclude

T = TypeVar("T")
_RANK_MODULE: Final = "ratchet_worker.rank.rank_process"  # imports torch and nearly everything else that a rank needs


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run one node's part of the attempt, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ratchet_worker.agent", description="Run one attempt's ranks.")
    parser.add_argument("launch_file", type=Path, help="launch.json of the attempt")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--node", type=int, default=0, help="number of this node, from 0 (default: %(default)s)")
    which.add_argument(
        "--node-from", metavar="VARIABLE", help="environment variable that holds the number of this node"
    )
    arguments = parser.parse_args(argv)
    node = arguments.node
    if arguments.node_from is not None:
        value = os.environ.get(arguments.node_from, "")
        if not (value.isascii() and value.isdigit()):
            parser.error(f"--node-from: {arguments.node_from} is {value!r}, not the number of a node")
        node = int(value)
    return run(arguments.launch_file.absolute(), node=node)


def run(launch_file: Path, starter: Starter | None = None, timing: Timing = Timing(), *, node: int = 0) -> int:
    """Run one node's part of the attempt and return the exit code. Blocks; call it in the main thread. Returns
    ``EXIT_LEASE_LOST`` without a start if another agent runs or ran this part, or the attempt is fenced."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the supervisor handles them
    paths = AttemptPaths(launch_file.parent).node(node)
    held = lock(paths)
    if held is None:
        log_message(f"{paths.lock_file} is held: another agent runs this attempt")
        return EXIT_LEASE_LOST
    if paths.agent_file.exists() or paths.result_file.exists():
        log_message(f"{paths.root} was run before; to retry, start a new attempt")
        return EXIT_LEASE_LOST
    fence = AttemptPaths(launch_file.parent).fence_file
    if fence.exists():  # checked after locking: the writer of the fence file checks for locks and processes afterwards
        log_message(f"{fence} exists: the attempt is over, and none of its processes is started")
        return EXIT_LEASE_LOST
    start_session()
    write_atomic(paths.agent_file, agent_file().model_dump_json().encode(), durable=True)
    reserve(paths.result_file)
    started_at = now()
    if start := os.environ.get(names.START):
        log_message(f"start: {start}")
    try:
        launch = load_launch(launch_file, node)
    except LaunchRefused as error:
        log_message(str(error))
        write_refusal(paths, launch_file, node, error, started_at)
        return exit_code_of(error.cause)
    return _Attempt(launch, starter or _starter(launch), timing, started_at).run()


def _starter(launch: LaunchFile) -> Starter:
    """Return the starter for this launch: one that forks the ranks, unless they use CUDA or there is only one."""
    # a process that has touched CUDA cannot be forked
    if launch.resolved.device == "cuda" or len(launch.ranks) == 1:
        return ProcessStarter()
    return ForkingStarter(preloaded_modules(launch))


def preloaded_modules(launch: LaunchFile) -> list[str]:
    """Return the modules that are imported before ranks are forked."""
    # Deterministic algorithms make torch import its compiler, which takes a second. Without them, user code runs before that
    # import and may set variables that the compiler reads, so it is not imported here.
    return [_RANK_MODULE, *(["torch._dynamo"] if launch.spec.determinism != "off" else [])]


class _Attempt:
    """One node's part of the attempt: start, supervision, clean-up and result, which is written even if another part fails."""

    def __init__(self, launch: LaunchFile, starter: Starter, timing: Timing, started_at: str) -> None:
        self._launch = launch
        self._timing = timing
        self._started_at = started_at
        self._paths = AttemptPaths(Path(launch.attempt_dir))
        self._node_paths = self._paths.node(launch.node)
        self._deadline = time.monotonic() + launch.deadlines.rendezvous
        self._supervisor = Supervisor(launch, self._paths, starter, timing)
        self._object_store = ObjectStoreSync(launch, self._paths)
        self._copies: MemoryCheckpoint | None = None
        self._logs = LogKeeper(launch, self._paths)
        spools = (
            {rank: self._paths.spool(rank) for rank in launch.ranks} | self._object_store.spools() | self._logs.spools()
        )
        self._rendezvous = NodeRendezvous(launch) if launch.spec.world.nodes > 1 else None
        self._report_sender = ReportSender(
            launch, spools, self._supervisor, period=timing.report, rendezvous=self._rendezvous
        )

    def run(self) -> int:
        """Run the ranks, clean up, write the result and send it to the service; return the agent's exit code."""
        ends: list[Ended] = []
        try:
            child_processes.become_subreaper()
            self._supervisor.install_signal_handlers()
            parent_death.end_with_parent(os.environ)
            self._supervisor.raise_if_over()
            self._logs.start()
            self._start()
            self._report_sender.start()
            self._object_store.start()
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
            conclusion = _crash_conclusion(error, any_rank=bool(ends))
        _print_errors(self._clean_up)
        saved = _print_errors(lambda: self._save_copies(conclusion.cause)) or ""
        _print_errors(self._logs.finish)
        _print_errors(lambda: self._finish_uploads(conclusion.cause))
        result = self._result(conclusion, ends, saved)
        self._report_result(result)
        return exit_code_of(result.cause)

    def _start(self) -> None:
        """Prepare this node, meet the other nodes and start the ranks. Raises ``NotStarted``, ``UserError``, ``TreeError`` or
        ``OSError``."""
        code, work = self._launch.code_dir, Path(self._launch.workdir)
        digest = code_download.download_code(self._launch, self._wait_until, self._supervisor.raise_if_over)
        self._deadline += self._object_store.fetch(self._report_sender, self._supervisor.wait_for)
        built = self._build_environment()
        if self._launch.node == 0:  # before the rendezvous: nodes that share this disk then find the directory ready
            self._prepare(code, work, digest)
        rendezvous = self._join_rendezvous()
        # closes the agent's copy of the store's socket: only rank 0 keeps it open
        with rendezvous.listener or nullcontext():
            if self._launch.node != 0:
                self._prepare(code, work, digest)
            self._copies = MemoryCheckpoint(self._launch, self._paths)
            plans = plan_ranks(
                self._launch, self._paths, rendezvous, inherited=os.environ, code_digest=digest, built=built,
                copies=self._copies.environment(),
            )  # fmt: skip
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
        """Create or update the working directory ``work``, and report files that are kept because the job has changed them."""
        left = working_directory.prepare(
            None if code is None else Path(code),
            work,
            digest or self._launch.resolved.code_digest,
            node=self._launch.node,
        )
        if left:
            names_left = ", ".join(left[:20]).encode("utf-8", "replace").decode() + " ..." * (len(left) > 20)
            text = (
                "the job continues with other code; files in its working directory that the job has changed are not "
                f"replaced: {names_left}. Modules are imported from the new code"
            )
            log_message(text)
            self._note(NoteType.WORK_KEPT, text)

    def _note(self, kind: NoteType, text: str) -> None:
        """Add an event to the job's history."""
        spool = Spool(self._paths.node_spool(self._launch.node))
        spool.append(Note(rank=node_rank(self._launch.node), at=now(), type=kind, message=text[:4000]))
        spool.close()

    def _build_environment(self) -> tuple[str, str] | None:
        """Return interpreter and digest of the environment for the job's requirements, which is built if necessary; None if the
        spec has no requirements. Raises ``NotStarted`` or ``UserError``."""
        if self._launch.spec.environment is None:
            return None
        self._report_sender.start()  # a build may take long: the service must see reports meanwhile

        def note(text: str) -> None:
            log_message(text)
            self._note(NoteType.ENVIRONMENT, text)

        begin = time.monotonic()
        built = environment.prepare(self._launch, self._node_paths, os.environ, self._supervisor.wait_for, note)
        self._deadline += time.monotonic() - begin
        return built

    def _join_rendezvous(self) -> Rendezvous:
        """Return the rendezvous of this node, with several nodes after all of them have met. Raises as
        ``NodeRendezvous.join``."""
        if self._rendezvous is None:
            return single_node(self._launch.world_size)
        told = os.environ.get(names.NODE_ADDRESS)
        return self._rendezvous.join(told, self._wait_until, self._report_sender.start)

    def _wait_until(self, done: Callable[[], T | None]) -> T | None:
        """Return the first value of ``done`` that is not None, or None after the time for the start. Raises ``NotStarted``."""
        return self._supervisor.wait_for(done, self._deadline)

    def _clean_up(self) -> None:
        """Kill processes that the ranks have left behind on this node, and delete the attempt's temporary directory there."""
        left = child_processes.kill_stragglers(names.NODE_DIR, str(self._node_paths.root))
        if left:
            log_message(f"processes {left} did not end after SIGKILL")
        shutil.rmtree(self._node_paths.tmp, ignore_errors=True)

    def _save_copies(self, cause: Cause) -> str:
        """Commit the ranks' copies in memory if they are newer than what is on the disk. Returns a text to append to the
        attempt's message."""
        # Failed saves may have had a reason that holds for the copies, too: replicas that differ.
        if self._copies is None or self._supervisor.evidence.fenced is not None or cause is Cause.CHECKPOINT_ERROR:
            return ""
        return self._copies.commit(self._base(), self._supervisor.last_step)

    def _finish_uploads(self, cause: Cause) -> None:
        """Finish the uploads to the object store, or abandon them if the attempt is fenced."""
        fenced = self._supervisor.evidence.fenced is not None
        self._object_store.finish(cause, fenced, self._supervisor.remaining_grace)

    def _result(self, conclusion: Conclusion, ends: list[Ended], saved: str) -> AttemptResult:
        """Return the content of ``result.json`` for this node. ``saved``: the result of ``_save_copies``."""
        base = self._base()
        last = max((e.end.last_step for e in ends), default=0) or (base.step if base is not None else 0)
        return AttemptResult(
            job_id=self._launch.job_id,
            attempt=self._launch.attempt,
            node=self._launch.node,
            cause=conclusion.cause,
            rank=conclusion.rank,
            exit_code=conclusion.exit_code,
            message=conclusion.message and conclusion.message + self._supervisor.evidence.aborts + saved,
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
        """What the attempt has started from, as the ranks have recorded it: a checkpoint, or step 0 for a start from scratch.
        None if no record can be read."""
        try:
            return Base.model_validate_json(self._paths.base_file.read_bytes())
        except (OSError, ValidationError):
            return None

    def _report_result(self, result: AttemptResult) -> None:
        """Write the result to the disk and, unless the attempt is fenced, send it to the service."""
        log_message(f"ended: {result.cause}: {result.message}")
        write_result(self._node_paths, result)
        if self._supervisor.evidence.fenced is None:
            self._report_sender.start()
            told = self._report_sender.finish(result, self._timing.delivery)
            log_message(
                "the service has received the result"
                if told
                else "the service was not reached; the result is on the disk"
            )


def _print_errors(work: Callable[[], T]) -> T | None:
    """Return what ``work`` returns; None after an error, such as one of the disk, which is printed: without a result the attempt
    would count as lost."""
    try:
        return work()
    except Exception:
        traceback.print_exc()
        return None


def _crash_conclusion(error: Exception, *, any_rank: bool) -> Conclusion:
    """The conclusion for a failure of the agent itself: launcher-error if no rank was started (``any_rank`` is False), else
    unknown."""
    cause = Cause.UNKNOWN if any_rank else Cause.LAUNCHER_ERROR
    return Conclusion(cause, None, None, f"the agent failed: {type(error).__name__}: {error}; see agent.log")
