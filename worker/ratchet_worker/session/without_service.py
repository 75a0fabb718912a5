"""A Session without a service: the script's own process takes the place of agent and service. Rank 0 creates the attempt,
and the ranks meet over torchrun's store or one that rank 0 serves. The runtime is the same as in a job."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import torch
from torch.distributed import destroy_process_group, is_initialized
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from ratchet_contract import env_vars as names
from ratchet_contract.errors import RatchetError, UserError
from ratchet_contract.exit_codes import EXIT_PREEMPTED
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.messages import LaunchFile, RankResult
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_contract.spec.run_without_service import spec_data
from ratchet_hooks.manage.managed_ddp import close_group
from ratchet_worker.coordination.process_group import Clients, Identity, check_no_process_group, sign_off
from ratchet_worker.coordination.reporter import Reporter
from ratchet_worker.coordination.stop_agreement import Agreement, Decision, Stopped, StopRequests
from ratchet_worker.coordination.stop_listener import Listener
from ratchet_worker.coordination.store_exchange import Exchange
from ratchet_worker.host import cpu, determinism
from ratchet_worker.host.exit import cause_of, exit_process, write_result
from ratchet_worker.ipc.log_lines import now
from ratchet_worker.ipc.progress_counter import StepCounter
from ratchet_worker.session.arguments import SessionArguments
from ratchet_worker.session.console_report import ConsoleReport, display_path, print_line
from ratchet_worker.session.run_directory import StandaloneDirectory
from ratchet_worker.session.script_seeds import ScriptSeeds
from ratchet_worker.state import import_draws, imported_code
from ratchet_worker.state.import_draws import installed_folders
from ratchet_worker.training.runtime import Runtime, start_runtime

_TIMEOUT: Final = 1800.0
"""Seconds that a rank waits for others, gloo's own default in torch: no service watches for a hang, and a debugger may pause
one of the ranks."""
_SIGN_OFF_SECONDS: Final = 3.0
_EXIT_INTERRUPTED: Final = 128 + signal.SIGINT


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks. ``nodes``: number of nodes; ``node``: this node's index; ``has_agent_store``:
    torchrun's agent serves the ranks' store; ``script``: the main file, None if the process does not run the user's script."""

    identity: Identity
    nodes: int
    node: int
    has_agent_store: bool
    script: Path | None

    @classmethod
    def current(cls) -> Place:
        """Return this process's place; without the variable ``RANK`` it is the only rank. Raises ``UserError`` if torchrun's
        variables are invalid."""
        env = os.environ
        if names.RANK not in env:
            return cls(Identity(0, 0, 1, "127.0.0.1", 0, None), 1, 0, False, _main_file())
        try:
            identity = Identity.from_env({name: value for name, value in env.items() if name != names.STORE_FD})
            per_node = int(env[names.LOCAL_WORLD_SIZE])
        except (KeyError, ValueError) as error:
            raise UserError(
                f"RANK is set, and of the other variables that torchrun sets one is missing or no number ({error}): start the "
                "script by torchrun, or by python without any of them",
                code="torchrun-variables",
            ) from None
        size = identity.world_size
        if per_node < 1 or size % per_node or not 0 <= identity.rank < size:
            raise UserError(
                f"RANK={identity.rank}, WORLD_SIZE={size} and LOCAL_WORLD_SIZE={per_node} do not describe a group with as many "
                "ranks on each node: start the script by torchrun, with the same --nproc-per-node on all nodes",
                code="torchrun-variables",
            )
        served = env.get(names.TORCHELASTIC_USE_AGENT_STORE) == "True"
        return cls(identity, size // per_node, identity.rank // per_node, served, _main_file())

    @property
    def owns_process(self) -> bool:
        """True if the main file is the user's script. False, for example, at a prompt, in a notebook or under pytest."""
        return self.script is not None

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node."""
        return self.identity.world_size // self.nodes


class Standalone:
    """The runs of this process without a service, one after the other."""

    def __init__(self) -> None:
        self._run: _Run | None = None
        self._stores: _Stores | None = None
        self._runs = 0
        self._arguments = SessionArguments()
        self._seeds = ScriptSeeds()
        self._earlier_objects = WeakSet[object]()
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def open(self, arguments: SessionArguments) -> Runtime:
        """Return the runtime of the open run. If no run is open, or the open one cannot go on, begin another run, on every rank.
        Raises ``UserError`` and ``CheckpointError``."""
        run = self._run
        failed = run is not None and not arguments.yields_to_script and run.has_failed_at_prompt
        if run is not None and run.runtime is not None and not run.is_over and not failed:
            if arguments.yields_to_script:
                if (odd := arguments.differences(run.runtime.launch.spec)) and run.runtime.rank == 0:
                    print_line(
                        f"the script's Session takes precedence over other values of the package: {', '.join(odd)}"
                    )
            elif arguments not in (self._arguments, SessionArguments()):
                raise UserError(
                    "another Session with other arguments is still open: leave its block first, or call finish()",
                    code="session-open",
                )
            return run.runtime
        _check_run_possible()
        if run is not None:
            run.end(_last_cell_error() if failed else None)
        place = Place.current()
        self._stores = self._stores or _Stores(place)
        self._runs, self._arguments = self._runs + 1, arguments
        self._run = _Run(place, self._stores.clients(self._runs), arguments, self._seeds)
        runtime = self._run.open()
        runtime.earlier_objects = self._earlier_objects
        return runtime

    def _at_exit(self) -> None:
        """End the last run at the interpreter's exit, and end the process if a stop was raised in a thread."""
        if self._run is not None and os.getpid() == self._pid:
            self._run.end(None, wait_for_ranks=not hasattr(sys, "last_value"))
            self._run.exit_if_stopped_in_thread()


def _last_cell_error() -> BaseException | None:
    """Return the last uncaught error, such as one that ended a cell at a prompt or in a notebook; None if there is none."""
    return getattr(sys, "last_value", None)


class _Run:
    """One rank's part in one start of a run without a service. ``runtime``: None until ``open`` has succeeded."""

    def __init__(self, place: Place, clients: Clients, arguments: SessionArguments, seeds: ScriptSeeds) -> None:
        self._place, self._clients, self._arguments, self._seeds = place, clients, arguments, seeds
        self._displayed_path = display_path(arguments.directory)
        self._listener = Listener()
        self._directory: StandaloneDirectory | None = None
        self._agreement: Agreement | None = None
        self._reporter: Reporter | None = None
        self._paths: AttemptPaths | None = None
        self._restore_signal_handlers: Callable[[], None] = lambda: None
        self._closed = self._ended = self._own_group = False
        # Before the first step; the error itself would hold its frames, and an earlier model in them.
        self._error_before = id(_last_cell_error())
        self.runtime: Runtime | None = None

    @property
    def is_over(self) -> bool:
        """True if the next Session begins another start, as after this run was closed or has finished."""
        if self._closed or self.runtime is None:
            return self._closed
        # At a prompt a stop ends a cell, and the next cell is another start.
        return self.runtime.finished or (self.runtime.stopped is not None and not self._place.owns_process)

    @property
    def has_failed_at_prompt(self) -> bool:
        """True if, at a prompt or in a notebook, an error has ended a cell since the first step, and the loop over steps has not
        ended. The script's next Session then begins another start."""
        runtime, error = self.runtime, _last_cell_error()
        if runtime is None or not runtime.restored or runtime.loop_ended or self._place.owns_process:
            return False
        return error is not None and id(error) != self._error_before

    def open(self) -> Runtime:
        """Start the run, on every rank, and return its runtime. If that fails, the run is ended on this rank."""
        try:
            return self._open()
        except BaseException as error:
            self.end(error)
            raise

    def _open(self) -> Runtime:
        """Agree on the launch file with the other ranks, prepare the process, and start the runtime. Raises ``UserError`` and
        ``CheckpointError``."""
        place, identity = self._place, self._place.identity
        check_no_process_group()
        self._own_group = True
        exchange = Exchange(self._clients.main, identity.rank, identity.world_size, _TIMEOUT)
        launch = self._launch(exchange)
        self._paths = AttemptPaths(Path(launch.attempt_dir))
        counter = StepCounter.create(self._paths.counter(identity.rank))
        spool = ConsoleReport(self._paths.spool(identity.rank), self._displayed_path, self._all_ranks_proved)
        self._reporter = Reporter(spool, identity.rank)
        _prepare_process(launch)
        self._seed(launch.spec.seed)
        self._restore_signal_handlers = self._listener.install_signal_handlers()
        self._reporter.report_started(launch.resolved.device, torch.__version__)
        self._agreement = Agreement(
            self._clients.side, identity.rank, identity.world_size, self._listen, self._on_early_decision
        )
        self._agreement.start()
        hold = self._listener.abort.block_if_aborting
        runtime = start_runtime(
            launch, identity, self._clients, _TIMEOUT, hold, self._agreement, counter, self._reporter
        )
        runtime.on_begin, runtime.on_nothing_left, runtime.on_exit = (
            self._on_begin,
            self._report_nothing_left,
            self.on_exit,
        )
        runtime.chosen.notes.extend(_caveats(launch, place, self._seeds.drawn))
        self.runtime = runtime
        return runtime

    def _seed(self, seed: int) -> None:
        """Seed the generators that the script has not seeded. From then on, undo what imports of installed packages draw from
        ``random``."""
        script = self._seeds.seed_others(seed, self._place.identity.rank)
        import_draws.undo_import_draws()
        if (
            script
            and "seed" in self._arguments.specified
            and seed != torch.initial_seed()
            and self._place.identity.rank == 0
        ):
            print_line(
                f"{', '.join(script)}: seeded by the script before Session(seed={seed}), which seeds only those that the "
                "script has not seeded"
            )

    def _launch(self, exchange: Exchange) -> LaunchFile:
        """Have rank 0 create the attempt, and return its launch file. An error of rank 0 is raised on all ranks, as ``UserError``
        on the others. Raises ``UserError`` if this rank's spec differs from rank 0's."""
        told: dict[str, Any] = {}
        spec = error = None
        try:
            spec = self._spec()
            if exchange.rank == 0:
                told = self._begin(spec)
        except (RatchetError, OSError) as error_:
            error = error_
            told = {"error": str(error_), "code": getattr(error_, "code", None)}
        told = exchange.broadcast("launch", told)
        if error is not None:
            raise error
        if "error" in told:
            raise UserError(f"rank 0: {told['error']}", code=told["code"])
        launch = LaunchFile.model_validate(told["launch"]).for_node(self._place.node)
        if spec != launch.spec:
            raise UserError(
                f"rank {exchange.rank} passes Session() other arguments than rank 0", code="session-arguments"
            )
        return launch

    def _begin(self, spec: JobSpec) -> dict[str, Any]:
        """On rank 0, lock the directory and create the attempt. Return the message for the other ranks. Raises ``UserError`` and
        ``CheckpointError``."""
        place = self._place
        directory = self._arguments.directory.absolute()
        facts = {
            "world_size": place.identity.world_size,
            "ranks": [*range(place.ranks_per_node)],
            "spec": spec,
            "resolved": _resolve(spec, place),
            "code_dir": None if place.script is None else str(place.script.parent),
            "workdir": str(Path.cwd()),
        }
        try:
            self._directory = StandaloneDirectory(directory)
            launch = self._directory.begin_attempt(facts)
        except OSError as error:
            raise UserError(
                f"{directory} cannot be used for checkpoints ({error.strerror or error}): give a directory that can be written "
                'to (Session("other-directory"))',
                code="directory-unusable",
            ) from error
        return {"launch": launch.model_dump(mode="json")}

    def _spec(self) -> JobSpec:
        """Return the spec from the Session's arguments and the defaults. Raises ``UserError`` if it is invalid or impossible
        here."""
        place = self._place
        script = ["session.py"] if place.script is None else [place.script.name, *sys.argv[1:]]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and place.ranks_per_node > torch.cuda.device_count():
            raise UserError(
                f"{pluralize(place.ranks_per_node, 'rank')} on CUDA, a GPU for each, and this machine has "
                f"{torch.cuda.device_count()}: start fewer, or set CUDA_VISIBLE_DEVICES= (empty) for the CPU",
                code="too-few-gpus",
            )
        spec = self._arguments.spec(spec_data(script, place.nodes, place.ranks_per_node, device))
        if spec.checkpoint.uri is not None:
            raise UserError(
                "checkpoint.uri: copies in an object store are made by Ratchet's agents, and this run has none: leave it out, or "
                "submit the script as a job",
                code="session-arguments",
            )
        if spec.determinism == "strict" and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise UserError(
                "determinism is strict, and PYTHONHASHSEED is not set: the order of a set of strings would be another in each "
                f"start. Set it before Python starts: PYTHONHASHSEED={spec.seed % 2**32}",
                code="hash-seed-random",
            )
        return spec

    # --- stops ---------------------------------------------------------------------------------------------------------

    def _listen(self, seconds: float) -> StopRequests:
        """Wait at most ``seconds`` for a signal; return the stop that signals have requested so far, if any. A second interrupt
        may end the process."""
        before = self._listener.interrupt_count
        cause, requests = self._listener.wait(seconds)
        if before == 0 < self._listener.interrupt_count and self._place.identity.rank == 0:
            print_line("interrupted: all ranks stop after a step, and save; interrupt again to end at once")
        if self._listener.interrupt_count > 1 and not self._place.owns_process:
            self._listener.forward_interrupt()
        elif self._listener.interrupt_count > 1:  # the main thread may be in a collective
            print_line("interrupted twice: ended at once")
            exit_process(_EXIT_INTERRUPTED)
        return StopRequests(cause, requests)

    def _on_early_decision(self, decision: Decision) -> None:
        """If the ranks have decided to stop before the first step, usually end the process with a preemption's exit code."""
        if decision.stop is None:
            return
        text = f"stopped before the first step ({decision.stop})"
        if not self._place.owns_process and self._listener.interrupt_count and self._listener.forward_interrupt():
            return
        self._write_result(decision.stop, text)
        print_line(text)
        sign_off(self._clients.side, self._place.identity, _SIGN_OFF_SECONDS)
        exit_process(EXIT_PREEMPTED)

    def _on_begin(self) -> None:
        """Before the first step, delete surplus checkpoints. An error that has ended an earlier cell does not count as an error
        of the training."""
        self._error_before = id(_last_cell_error())
        self._delete_surplus()

    def _all_ranks_proved(self) -> bool:
        """Count this rank as one whose redone steps are all equal. Return True if all ranks are counted now."""
        return self._clients.main.add("proved", 1) == self._place.identity.world_size

    # --- ends ----------------------------------------------------------------------------------------------------------

    def on_exit(self, error: BaseException | None) -> None:
        """At the end of the Session's block, close a run that has finished without ``error``; otherwise end the run."""
        if error is None and self.runtime is not None and self.runtime.finished:
            self._close(Cause.COMPLETED, None)
        else:
            self.end(error)

    def end(self, error: BaseException | None, *, wait_for_ranks: bool = True) -> None:
        """End the run on this rank: write the result, and clean up. ``wait_for_ranks``: after a stop or completion, wait for the
        other ranks and close the process group."""
        if self._ended:
            return
        self._ended = True
        if error is None and self.runtime is not None and not self.runtime.restored and self.runtime.rank == 0:
            print_line("ended without a step: there is no new checkpoint")
        cause, message = self._outcome(error)
        together = cause is Cause.COMPLETED or isinstance(self._stop_or_error(error), Stopped)
        self._close(cause, message)
        if self._agreement is not None:
            self._agreement.close()
        if self._reporter is not None:
            self._reporter.close()
        with suppress(RuntimeError):  # another rank has already gone
            if together:
                # Not after an error that followed the training: other ranks may never get here, and torchrun ends them after this
                # process.
                if wait_for_ranks:
                    close_group()
                sign_off(self._clients.side, self._place.identity, _SIGN_OFF_SECONDS)
            elif self._own_group and is_initialized() and self._place.identity.world_size == 1:
                destroy_process_group()  # with other ranks, they may wait in a collective, which ends with this process

    def exit_if_stopped_in_thread(self) -> None:
        """End the script's own process if a stop was raised in a thread other than the main one."""
        runtime = self.runtime
        if runtime is None or runtime.stopped is None or runtime.trainer is threading.main_thread():
            return
        # Python ignores a SystemExit in a thread.
        if self._place.owns_process:
            exit_process(EXIT_PREEMPTED)

    def _stop_or_error(self, error: BaseException | None) -> BaseException | None:
        """Return ``error``. If it is None, return the stop that has ended the steps; None without either."""
        return error or (None if self.runtime is None else self.runtime.stopped)

    def _outcome(self, error: BaseException | None) -> tuple[Cause, str | None]:
        """Return cause and message for this rank's result. ``error``: the exception that ended the run; None if there was
        none."""
        runtime, error = self.runtime, self._stop_or_error(error)
        if runtime is not None and runtime.restored and (runtime.finished or runtime.done) and error is None:
            return Cause.COMPLETED, None
        if isinstance(error, Stopped):
            return error.cause, error.message
        if error is not None:
            return cause_of(error)
        return Cause.EXCEPTION, "the process continued without ending the run: its Session's block was not left"

    def _close(self, cause: Cause, message: str | None) -> None:
        """Write the result and release the directory, once. May restore signal handlers, delete surplus checkpoints and ignore
        later SIGTERMs."""
        if self._closed:
            return
        self._closed = True
        self._seeds.on_run_end()
        runtime = self.runtime
        stopped = runtime is not None and runtime.stopped is not None
        if threading.current_thread() is threading.main_thread():  # no other thread may restore signal handlers
            self._restore_signal_handlers()
            if stopped and self._place.owns_process:  # torchrun sends one to ranks that are still exiting
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._write_result(cause, message)
        if runtime is not None and runtime.restored and cause is not Cause.COMPLETED:
            self._report_next_start(runtime)
        if self._directory is not None:
            if (
                runtime is not None
                and runtime.step > runtime.chosen.base.step
                and (stopped or cause is Cause.COMPLETED)
            ):
                self._delete_surplus()
            self._directory.close()

    def _report_next_start(self, runtime: Runtime) -> None:
        """Print, on rank 0, from which checkpoint the next start continues. It may first wait for an unfinished save."""
        if runtime.stopped is not None:
            text, at = f"stopped after step {runtime.step}", f"step {runtime.checkpointer.last.step} of"
        else:
            text, at = "not ended", "the newest checkpoint in"
            if (
                runtime.world_size == 1
            ):  # this process may live on and begin the next start; with other ranks, they may be gone
                with suppress(RatchetError):
                    runtime.checkpointer.drain()
            if runtime.checkpointer.last.step == 0:
                at = "the newest checkpoint, if there is one, in"
        if runtime.rank == 0:
            print_line(f"{text}: the next start continues from {at} {self._displayed_path}")

    def _report_nothing_left(self) -> None:
        """Print, on rank 0, that the run has ended already and this start has no step to do."""
        runtime = self.runtime
        assert runtime is not None
        if runtime.rank != 0:
            return
        before, further = runtime.earlier_total, ""
        if before is not None and not runtime.is_extended:  # otherwise it asks for more steps, of epochs that are over
            further = f"It continues if the script requests more than {pluralize(before, 'step')}. "
        print_line(
            f"the run in {self._displayed_path} has ended with step {runtime.step}, so that nothing is left to "
            f"do. {further}For a new run "
            "use another directory"
        )

    def _delete_surplus(self) -> None:
        """On rank 0, delete the checkpoints that the spec does not keep, and print those that could not be deleted."""
        if self._directory is not None and self.runtime is not None:
            for note in self._directory.delete_surplus(self.runtime.launch.spec.checkpoint):
                print_line(note)

    def _write_result(self, cause: Cause, message: str | None) -> None:
        """Write this rank's result file; nothing if the attempt was not created."""
        if self._paths is not None:
            step = 0 if self.runtime is None else self.runtime.step
            rank = self._place.identity.rank
            write_result(self._paths, RankResult(rank=rank, cause=cause, at=now(), last_step=step, message=message))


class _Stores:
    """The store over which the ranks meet: that of torchrun's agent, or one that rank 0 serves."""

    def __init__(self, place: Place) -> None:
        self._place, identity = place, place.identity
        self._limit = timedelta(seconds=_TIMEOUT)
        self._server: Store | None = None
        self._port = identity.port
        if identity.rank == 0 and not place.has_agent_store:
            server = TCPStore(identity.host, identity.port, is_master=True, timeout=self._limit, wait_for_workers=False)
            self._server, self._port = server, server.port

    def clients(self, number: int) -> Clients:
        """Connect to the store and return clients for run ``number`` of the process."""
        # After a restart torchrun's store still has the values of the earlier start.
        restarts = os.environ.get(names.TORCHELASTIC_RESTART_COUNT, "0")

        def client() -> Store:
            store = TCPStore(self._place.identity.host, self._port, is_master=False, timeout=self._limit)
            return PrefixStore(f"ratchet/{restarts}/{number}", store)

        return Clients(client(), client(), client(), client(), self._server)


def _check_run_possible() -> None:
    """Raise ``UserError`` if a rank of a job or ``multiprocessing`` started this process, or if this is not the main thread."""
    if job := os.environ.get(names.JOB_ID):
        raise UserError(
            f"this process was started by a rank of job {job}, and is no rank: make the Session in the script that the job "
            "names, and give this process what it needs",
            code="not-a-rank",
        )
    if multiprocessing.parent_process() is not None:
        raise UserError(
            "Session() is called in a process that the script has started. A worker of a DataLoader imports the main file again: "
            'call it below `if __name__ == "__main__":`. Ranks that torch.multiprocessing.spawn starts: leave that out, and '
            "start the script by torchrun",
            code="not-a-rank",
        )
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "without a service the Session is made on the main thread, where signals are handled; its steps may run in another",
            code="not-the-main-thread",
        )


def _main_file() -> Path | None:
    """Return the absolute path of the main file. Return None if there is no main file, or if it belongs to an installed
    program."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not (path := Path(file).absolute()).is_file():  # "<stdin>"
        return None
    programs = (*installed_folders(), Path(sysconfig.get_path("scripts")))
    return None if any(path.is_relative_to(folder) for folder in programs) else path


def _resolve(spec: JobSpec, place: Place) -> Resolved:
    """Return the values that a service resolves at submission, such as the device and the threads per rank."""
    device = spec.world.device
    backend = spec.ddp.backend
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    return Resolved(
        device="cuda" if device == "cuda" else "cpu",
        backend=("nccl" if device == "cuda" else "gloo") if backend == "auto" else backend,
        threads_per_rank=(threads.isdecimal() and int(threads)) or max(1, cores // place.ranks_per_node),
        python=sys.executable,
        code_digest=imported_code.digest(place.script),
    )


def _caveats(launch: LaunchFile, place: Place, drawn: list[str]) -> list[str]:
    """Return a list with one note on what a resume's verdict does not cover. ``drawn``: generators that the script used
    unseeded."""
    unseen = "code that was not imported yet when Session() was called" + " and the main file" * (place.script is None)
    out = [unseen if launch.resolved.code_digest is not None else "the code, which has no file"]
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        out.append("the order of sets of strings, since PYTHONHASHSEED is not set")
    if drawn:
        out.append(
            f"what was drawn from {', '.join(drawn)} before Session() without a seed, which differs in each start"
        )
    return [f"not compared: {'; '.join(out)}"]


def _prepare_process(launch: LaunchFile) -> None:
    """Apply those settings of a job's rank that a running process can still take."""
    if launch.spec.world.nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if launch.spec.determinism != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    determinism.apply(launch.spec.determinism, launch.resolved.threads_per_rank)
    if launch.resolved.device == "cpu":
        cpu.keep_freed_memory()
