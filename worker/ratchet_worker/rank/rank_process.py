"""A rank's process from start to end: rendezvous, the choice of a checkpoint, the user's code, and the rank's result."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

import torch
from torch.distributed import destroy_process_group, is_initialized
from torch.distributed.distributed_c10d import Store

from ratchet_contract import env_vars as names
from ratchet_contract.errors import UserError
from ratchet_contract.exit_codes import EXIT_COMPLETED, EXIT_PREEMPTED
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause, NoteType
from ratchet_contract.protocol.messages import LaunchFile, RankResult
from ratchet_hooks.manage.managed_ddp import close_group
from ratchet_worker.coordination.process_group import Clients, Identity, connect, rank_device, select_device, sign_off
from ratchet_worker.coordination.reporter import Reporter
from ratchet_worker.coordination.stop_agreement import Agreement, Decision, Stopped, StopRequests
from ratchet_worker.coordination.stop_listener import Listener
from ratchet_worker.coordination.store_exchange import Abandoned, Exchange
from ratchet_worker.host import cpu, determinism, resource_limits, user_code
from ratchet_worker.host.exit import ScriptExit, cause_of, exit_code_of, exit_process, write_result
from ratchet_worker.ipc.disk_reserve import reserve
from ratchet_worker.ipc.log_lines import now, print_to_log
from ratchet_worker.ipc.progress_counter import StepCounter
from ratchet_worker.ipc.report_spool import Spool
from ratchet_worker.rank.unmanaged_script import Unmanaged
from ratchet_worker.resume.choose_checkpoint import choose_in_background
from ratchet_worker.resume.read_checkpoint import Chosen
from ratchet_worker.session import mlflow_run
from ratchet_worker.session.arguments import SessionArguments
from ratchet_worker.session.session import Session
from ratchet_worker.state import environment, import_draws, object_walk, package_list, rng, state_dict_names
from ratchet_worker.state.imported_packages import Record
from ratchet_worker.state.thread_pools import is_working
from ratchet_worker.training import task_loop
from ratchet_worker.training.runtime import Runtime, start_runtime

_SIGN_OFF_SECONDS: Final = 3.0
_EARLY_STOP_SECONDS: Final = 2.0


class RankProcess:
    """One rank, from the start of the process to its end. Create it once per process, on the main thread."""

    def __init__(self, launch: LaunchFile, listener: Listener) -> None:
        self._launch, self._listener = launch, listener
        self._identity = Identity.from_env(os.environ)
        self._paths = AttemptPaths(Path(launch.attempt_dir))
        self._counter = StepCounter.create(self._paths.counter(self._identity.rank))
        spool = Spool(self._paths.spool(self._identity.rank))
        self._reporter = Reporter(spool, self._identity.rank, listener.abort.block_if_aborting)
        reserve(self._paths.rank_result(self._identity.rank))
        self._unmanaged = Unmanaged(launch, self._identity.rank, self._counter, self._reporter, listener)
        # Longer than the agent's deadlines: a hang must be reported as a hang, not as a failed collective.
        self._timeout = max(launch.deadlines.rendezvous, launch.deadlines.step) + 30
        self._clients: Clients | None = None
        self._agreement: Agreement | None = None
        self._choice: Future[Chosen] | None = None
        self._runtime: Runtime | None = None
        self._signed_off = False
        self._open_lock = threading.Lock()  # several threads of a script may make Sessions concurrently
        self._opener: threading.Thread | None = None
        self._thread_error: BaseException | None = None
        self._exit_lock = threading.Lock()

    def execute(self) -> int:
        """Run the rank to its end. Return the process's exit code, or exit the process."""
        atexit.register(self._release)  # the script's own exit handlers run before
        try:
            self._run()
            self._finish()
            self._wait_for_early_stop()
        except BaseException as error:
            return self._exit_by_error(error)
        if self._unmanaged.passed_stop is not None:
            return self._exit_after_passed_stop(self._unmanaged.passed_stop, None)
        return self._exit_together(Cause.COMPLETED, EXIT_COMPLETED, None)

    def _release(self) -> None:
        """Drop what refers to the script's objects, so that Python's shutdown destroys them."""
        self._runtime = None
        object_walk.forget_classes()
        state_dict_names.forget_classes()

    # --- the way in ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Prepare the process, connect to the store, and run the task or the script. Raises the error or the stop that
        ends the rank."""
        launch, identity, spec = self._launch, self._identity, self._launch.spec
        resource_limits.apply(launch)
        code = Path(launch.code_dir or launch.workdir)
        unmanaged = spec.script is not None and user_code.is_unmanaged(spec.script, code)
        self._listener.follow(self._paths.node(launch.node).control_file, launch.desired)
        determinism.apply(spec.determinism, launch.resolved.threads_per_rank)
        if launch.resolved.device == "cpu":
            cpu.keep_freed_memory()
        # Processes that the script forks cannot use a device made current here: an unmanaged script chooses that itself.
        device = rank_device(launch, identity) if unmanaged else select_device(launch, identity)
        rng.seed_all(spec.seed, identity.rank)
        import_draws.undo_import_draws()
        self._reporter.report_started(str(device), torch.__version__, os.environ.get(names.START))
        self._clients = connect(identity, self._timeout)
        self._agreement = Agreement(
            self._clients.side, identity.rank, identity.world_size, self._listen, self._on_early_decision
        )
        self._agreement.start()
        self._counter.tick()
        self._check_same_code()
        self._find_mlflow_run()
        if not unmanaged:  # else the script is not expected to continue from a checkpoint
            self._choice = choose_in_background(launch, self._exchange(self._clients.main), self._reporter)
        user_code.add_to_path(code)
        if spec.task is not None:
            self._record_imports()
            task_loop.run_task(self._open(), user_code.make_task(spec.task, code))
            return
        assert spec.script is not None
        Session._opener = self._open
        threading.excepthook = self._on_thread_exception
        if unmanaged:
            if identity.rank == 0:
                environment.write(self._launch, package_list.installed())
            self._unmanaged.begin()
        try:
            self._run_script(spec.script, code)
        finally:
            self._unmanaged.on_script_end()

    def _record_imports(self) -> None:
        """On rank 0, where agents are parked, record which packages the user's code imports from now on."""
        if self._identity.rank == 0 and names.START in os.environ:
            import_draws.record_imports(Record(self._paths.imports_file))

    def _find_mlflow_run(self) -> None:
        """If the job logs to an MLflow server, set the variable ``MLFLOW_RUN_ID`` to the run of this job, the same on all
        ranks. May wait for rank 0, which finds or creates the run. Raises ``UserError`` or ``WorkerError`` if the server does not
        answer."""
        # mlflow may be installed on some nodes only: rank 0 decides
        if (
            not os.environ.get(names.MLFLOW_TRACKING_URI)
            or names.MLFLOW_RUN_ID in os.environ
            or self._launch.spec.trial
        ):
            return
        assert self._clients is not None
        found = None
        if self._identity.rank == 0 and find_spec("mlflow") is not None:
            found = mlflow_run.find_in_new_process(self._launch.job_id, self._launch.attempt)
            self._counter.tick()
        if (run_id := self._exchange(self._clients.main).broadcast("mlflow-run", found)) is not None:
            os.environ[names.MLFLOW_RUN_ID] = run_id

    def _check_same_code(self) -> None:
        """Raise ``UserError`` if code that lies on the nodes (``code.source: nodes``) differs between them. May wait for all
        ranks."""
        launch = self._launch
        if launch.spec.code is None or launch.spec.code.source != "nodes" or launch.spec.world.nodes == 1:
            return
        assert self._clients is not None
        exchange = self._exchange(self._clients.main)
        found: dict[str, list[str]] = {}
        for node, digest in enumerate(exchange.gather("code", launch.resolved.code_digest)[:: len(launch.ranks)]):
            found.setdefault(digest, []).append(str(node))
        if len(found) > 1:
            told = "; ".join(f"node {', '.join(nodes)} has {digest[:16]}" for digest, nodes in found.items())
            raise UserError(
                f"code.path: {launch.code_dir} is not the same on all nodes: {told} (code.source is nodes). Put the same files "
                "on all of them, or leave code.source out, and the service distributes one snapshot",
                code="code-differs",
            )

    def _open(self, arguments: SessionArguments = SessionArguments()) -> Runtime:
        """Return the runtime. If there is none yet, first join the group and choose a checkpoint with all ranks; this may raise
        ``Stopped``, ``UserError`` and ``CheckpointError``. ``arguments``: those of the script's Session."""
        with self._open_lock:
            if (odd := arguments.differences(self._launch.spec)) and self._identity.rank == 0:
                text = f"the job's spec takes precedence over other values in the script: {', '.join(odd)}"
                self._reporter.note(NoteType.SESSION_ARGUMENTS, text)
            if self._runtime is None:
                self._opener = threading.current_thread()
                self._runtime = self._join()
            return self._runtime

    def _join(self) -> Runtime:
        """Join the process group and start the runtime. Raises ``Stopped`` if a stop was passed to the script before."""
        assert self._clients is not None and self._agreement is not None
        launch, identity = self._launch, self._identity
        stop = self._unmanaged.become_managed()
        if stop is not None:
            raise Stopped(stop, f"stopped before the first step ({stop})")
        hold = self._listener.abort.block_if_aborting
        return start_runtime(
            launch,
            identity,
            self._clients,
            self._timeout,
            hold,
            self._agreement,
            self._counter,
            self._reporter,
            self._choice,
        )

    @property
    def _trainer(self) -> threading.Thread | None:
        """The thread that runs the steps: it has restored the state or requested the last step. Before that, the thread that has
        made the Session; None without a Session."""
        stepping = None if self._runtime is None else self._runtime.trainer
        return stepping or self._opener

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        """Handle the exception that has ended a thread (``threading.excepthook``). If this thread runs the steps, an error or a
        stop ends the rank. The error of another thread is kept."""
        with suppress(Exception):  # the script may have closed the stream that this prints to
            threading.__excepthook__(args)
        assert args.exc_value is not None
        error = self._classify_error(args.exc_value)
        if error is None:
            return
        if args.thread is self._trainer:
            exit_process(self._exit_by_error(error))
        self._thread_error = error

    def _exchange(self, client: Store, timeout: float | None = None) -> Exchange:
        """Return an exchange with all ranks over ``client``. ``timeout``: seconds; None: the process's default."""
        identity, limit = self._identity, self._timeout if timeout is None else timeout
        return Exchange(client, identity.rank, identity.world_size, limit, self._listener.abort.block_if_aborting)

    def _run_script(self, script: Sequence[str], code: Path) -> None:
        """Run the script in this thread. Raises the error that ends the attempt, if any; see ``_classify_error``."""
        try:
            user_code.run_script(script, code, self._record_imports)
        except BaseException as error:
            judged = self._classify_error(error)
            if judged is error:
                raise
            if judged is not None:
                raise judged from error

    def _classify_error(self, error: BaseException) -> BaseException | None:
        """Return the error that ends the attempt, ``error`` or a clearer one; None for a ``sys.exit`` that is not an error
        (``_classify_exit``)."""
        if isinstance(error, Stopped):
            return error
        if isinstance(error, SystemExit):
            return self._classify_exit(error)
        runtime, launch = self._runtime, self._launch
        trained = runtime is not None and runtime.step > runtime.chosen.base.step
        if isinstance(error, ModuleNotFoundError | SyntaxError) and not trained:
            assert launch.spec.script is not None
            code = Path(launch.code_dir or launch.workdir)
            return user_code.import_error(f"script {launch.spec.script[0]!r}", error, code)
        return error

    def _classify_exit(self, exit_: SystemExit) -> Exception | None:
        """Return the error that a ``sys.exit`` of the script stands for; None for a success, after a stop passed to the
        script's own handler, or after a SIGTERM to an unmanaged script."""
        runtime = self._runtime
        stopped = self._unmanaged.passed_stop is not None or (
            self._unmanaged.active and self._listener.sigterm_received
        )
        if stopped:  # the script's own handler has called sys.exit
            return None
        if exit_.code not in (None, 0):
            return ScriptExit(exit_)
        if runtime is not None and runtime.restored and not (runtime.finished or runtime.done):
            return RuntimeError(
                f"the script called sys.exit after step {runtime.step}, before its loop had ended: this is not a success. Leave "
                "the loop by `break`, and call sys.exit only after the Session's block"
            )
        return None

    def _finish(self) -> None:
        """Finish the run after the end of the task or the script. May wait for threads that still train, or for the other ranks'
        scripts. May raise the error of a thread that failed before any step."""
        while self._may_train():
            time.sleep(0.02)
        if self._runtime is not None and self._runtime.restored:
            self._runtime.finish()
            return
        if self._choice is not None:  # no Session has used it; its thread uses the store
            wait([self._choice])
        if not self._unmanaged.active:
            if self._thread_error is not None:
                raise self._thread_error
            if self._identity.rank == 0:
                self._reporter.note(
                    NoteType.NO_SESSION, "the script ended without a step of a Session: there is no checkpoint"
                )
            self._unmanaged.begin()
        # Wait for the others: rank 0 serves the store that they may still need. A stop can end the wait.
        assert self._clients is not None
        exchange = self._exchange(self._clients.main, math.inf)
        with suppress(Abandoned):
            exchange.gather("script-end", None, should_abandon=lambda: self._unmanaged.passed_stop is not None)

    def _may_train(self) -> bool:
        """True if a thread other than this one may still be training."""
        runtime, here = self._runtime, threading.current_thread()
        if runtime is not None and (trainer := runtime.trainer) is not None:
            over = trainer.daemon and (runtime.finished or runtime.done)
            return trainer is not here and not over and is_working(trainer)
        return not self._unmanaged.active and any(
            thread is not here and (thread is self._opener or not thread.daemon) and is_working(thread)
            for thread in threading.enumerate()
        )

    def _listen(self, seconds: float) -> StopRequests:
        """Wait up to ``seconds`` for requests, and return all that this rank has received so far."""
        return StopRequests(*self._listener.wait(seconds))

    def _on_early_decision(self, decision: Decision) -> None:
        """Handle a decision that the ranks made before any step. Called on the side thread. A stop may exit the process."""
        if decision.stop is None:
            if self._identity.rank == 0:
                self._reporter.note(
                    NoteType.CHECKPOINT_NOT_NEEDED, "no step of a Session was done in this attempt: nothing to save"
                )
        elif not self._unmanaged.pass_stop(decision.stop):
            self._exit_before_first_step(decision.stop)

    def _wait_for_early_stop(self) -> None:
        """If a stop was decided before this rank began a step, block until the stop is passed to the script's own handler.
        Without such a handler, the side thread exits the process meanwhile. Waits up to 2 seconds for a pending decision."""
        # An error may come from a rank that has left because of a stop that this rank's side thread does not know yet.
        if self._agreement is not None and self._agreement.is_stopped_early(_EARLY_STOP_SECONDS):
            while self._unmanaged.passed_stop is None:
                time.sleep(0.005)

    # --- the ways out --------------------------------------------------------------------------------------------------

    def _exit_by_error(self, error: BaseException) -> int:
        """End this rank because of ``error``. Returns the exit code if ``error`` is a stop, or if a stop was passed to the
        script's own handler. Otherwise, or if leaving the group fails, exits the process."""
        self._listener.abort.block_if_aborting()
        self._wait_for_early_stop()
        if self._unmanaged.passed_stop is not None:
            return self._exit_after_passed_stop(self._unmanaged.passed_stop, error)
        if not isinstance(error, Stopped):
            self._fail(error)
        code = EXIT_COMPLETED if error.cause is Cause.COMPLETED else EXIT_PREEMPTED
        return self._exit_together(error.cause, code, error.message)

    def _claim_exit(self) -> None:
        """Return in the first thread that calls this, which may end the process. Blocks or ends any later thread."""
        thread = threading.current_thread()
        if not self._exit_lock.acquire(blocking=thread is threading.main_thread() or thread.daemon):
            # Not blocked: Python's shutdown waits for a non-daemon thread.
            sys.exit()

    def _exit_together(self, cause: Cause, code: int, message: str | None) -> int:
        """Write the result, leave the group, and return ``code``. If leaving fails, as after another rank's death, exits the
        process with ``code``. May wait for the other ranks."""
        self._claim_exit()
        self._write_result(cause, message, None)
        assert self._agreement is not None
        self._agreement.close()
        self._reporter.close()
        try:
            if self._runtime is not None:
                close_group()
            else:  # no collective: the state of the script's own group is unknown
                self._sign_off(_SIGN_OFF_SECONDS)
                if is_initialized():
                    destroy_process_group()
        except RuntimeError as error:  # another rank was killed on the way out; this one's result stands
            print_to_log(f"ratchet: leaving the group: {error}")
            exit_process(code)
        return code

    def _exit_after_passed_stop(self, cause: Cause, error: BaseException | None) -> int:
        """End this rank, as ``_exit_together`` does, after the script's own handler has received a stop with ``cause``.
        ``error``: the exception that ended the script, if any."""
        message = "the script received SIGTERM and ended by itself"
        if error is not None and not isinstance(error, SystemExit):
            message += f", with {type(error).__name__}: {error}"
            print_to_log(_traceback(error))
        with suppress(RuntimeError):
            if is_initialized():
                destroy_process_group()  # a rank that still waits for this one in a collective gets an error, and ends
        self._sign_off(self._launch.spec.policy.stop_grace)
        return self._exit_together(cause, EXIT_PREEMPTED, message[:4000])

    def _fail(self, error: BaseException) -> NoReturn:
        """Write the result and exit the process without the other ranks, which the agent ends."""
        self._claim_exit()
        cause, message = cause_of(error)
        trace = _traceback(error)
        print_to_log(trace)
        self._write_result(cause, message, trace)
        self._reporter.close()
        exit_process(exit_code_of(error, cause))

    def _exit_before_first_step(self, cause: Cause) -> None:
        """Write the result and exit the process for a stop with ``cause`` before any step. Called on the side thread."""
        self._claim_exit()
        message = f"stopped before the first step ({cause})"
        if self._unmanaged.passed_stop is not None:
            message = "the script received SIGTERM and did not end within policy.stop_grace"
        elif self._unmanaged.active:
            message = "the script does not handle SIGTERM and was ended by it"
            self._sign_off(self._launch.spec.policy.stop_grace)  # other ranks' handlers may be at work
        self._write_result(cause, message, None)
        self._reporter.close()
        self._sign_off(_SIGN_OFF_SECONDS)
        exit_process(EXIT_PREEMPTED)

    def _sign_off(self, seconds: float) -> None:
        """Record, once, that this rank does not use the store any more. Rank 0 then waits up to ``seconds`` for the records of
        all ranks."""
        if self._signed_off:
            return
        self._signed_off = True
        assert self._clients is not None
        sign_off(self._clients.side, self._identity, seconds)

    def _write_result(self, cause: Cause, message: str | None, trace: str | None) -> None:
        """Write this rank's result file; a failed write is only printed. ``trace``: the traceback as text. Blocks forever if the
        agent has requested an abort."""
        self._listener.abort.block_if_aborting()
        step = self._runtime.step if self._runtime is not None else 0
        write_result(
            self._paths,
            RankResult(
                rank=self._identity.rank, cause=cause, at=now(), last_step=step, message=message, traceback=trace
            ),
        )


def _traceback(error: BaseException) -> str:
    """Return the traceback of ``error`` as text, without leading frames of Ratchet if a user's frame follows. For arguments that
    the script refused, only the message."""
    if isinstance(error, ScriptExit):
        if error.cause is Cause.USER_ERROR:
            return f"{error}\n"
        error = error.__cause__ or error
    first = error.__traceback__
    while first is not None and _is_runner_file(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    users = first is not None and object_walk.is_user_module(str(first.tb_frame.f_globals.get("__name__")))
    return "".join(traceback.format_exception(type(error), error, first if users else error.__traceback__))


def _is_runner_file(file: str) -> bool:
    """True if a source file belongs to ``ratchet_worker``."""
    return Path(file).is_relative_to(Path(__file__).parents[1])
