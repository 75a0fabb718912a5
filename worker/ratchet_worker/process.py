"""A rank's process from start to end: facts, rendezvous, base, the user's code, and a ``RankResult`` in every way out.

The result is written before the process leaves its group: the file's time tells which rank ended first.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import torch
from torch.distributed import destroy_process_group, is_initialized
from torch.distributed.distributed_c10d import Store

from ratchet_contract.errors import UserError
from ratchet_contract.exit_codes import EXIT_COMPLETED, EXIT_PREEMPTED
from ratchet_contract.messages import LaunchFile, RankResult
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_hooks.build import close_group
from ratchet_worker import (
    allocator,
    determinism,
    environment_record,
    import_draws,
    limits,
    loop,
    package_list,
    rng,
    user_code,
)
from ratchet_worker.agreement import Agreement, Decision, Stopped, Wish
from ratchet_worker.counter import StepCounter
from ratchet_worker.endings import ScriptExit, cause_of, exit_code_of, leave_process, write_result
from ratchet_worker.exchange import Abandoned, Exchange
from ratchet_worker.files import now, reserve
from ratchet_worker.group import Clients, Identity, connect, device_of, farewell, named_device
from ratchet_worker.listener import Listener
from ratchet_worker.object_walk import is_users_module
from ratchet_worker.reporter import Reporter
from ratchet_worker.runtime import Runtime, join
from ratchet_worker.session import Session
from ratchet_worker.session_arguments import SessionArguments
from ratchet_worker.spool import Spool
from ratchet_worker.thread_pools import at_work
from ratchet_worker.unmanaged import Unmanaged

_FAREWELL_SECONDS: Final = 3.0
_NEWS_SECONDS: Final = 2.0


class RankProcess:
    """Made once per process, on its main thread."""

    def __init__(self, launch: LaunchFile, listener: Listener) -> None:
        self._launch, self._listener = launch, listener
        self._identity = Identity.of(os.environ)
        self._paths = AttemptPaths(Path(launch.attempt_dir))
        self._counter = StepCounter.create(self._paths.counter(self._identity.rank))
        spool = Spool(self._paths.spool(self._identity.rank))
        self._reporter = Reporter(spool, self._identity.rank, listener.abort.hold)
        reserve(self._paths.rank_result(self._identity.rank))
        self._unmanaged = Unmanaged(launch, self._identity.rank, self._counter, self._reporter, listener)
        # The agent's deadlines come first: a hang is to be told as a hang, not as a broken collective.
        self._timeout = max(launch.deadlines.meeting, launch.deadlines.step) + 30
        self._clients: Clients | None = None
        self._agreement: Agreement | None = None
        self._runtime: Runtime | None = None
        self._parted = False
        self._opening = threading.Lock()  # a script's threads may make Sessions at one time
        self._opener: threading.Thread | None = None
        self._thread_error: BaseException | None = None
        self._way_out = threading.Lock()

    def execute(self) -> int:
        """Run to the end. Returns the exit code of an end that all ranks share; otherwise does not return."""
        try:
            self._run()
            self._finish()
            self._heed_early_stop()
        except BaseException as error:
            return self._leave_by(error)
        if self._unmanaged.told is not None:
            return self._leave_as_told(self._unmanaged.told, None)
        return self._leave(Cause.COMPLETED, EXIT_COMPLETED, None)

    # --- the way in ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        launch, identity, spec = self._launch, self._identity, self._launch.spec
        limits.apply(launch)
        code = Path(launch.code_dir or launch.workdir)
        unmanaged = spec.script is not None and user_code.is_unmanaged(spec.script, code)
        self._listener.follow(self._paths.node(launch.node).control_file, launch.desired)
        determinism.apply(spec.determinism, launch.resolved.threads_per_rank)
        if launch.resolved.device == "cpu":
            allocator.keep_freed()
        # A device that is made current cannot be used by processes that the script forks: that is its own affair.
        device = named_device(launch, identity) if unmanaged else device_of(launch, identity)
        rng.seed_all(spec.seed, identity.rank)
        import_draws.take_back_draws()
        self._reporter.started(str(device), torch.__version__)
        self._clients = connect(identity, self._timeout)
        self._agreement = Agreement(
            self._clients.side, identity.rank, identity.world_size, self._listen, self._decided_early
        )
        self._agreement.start()
        self._counter.tick()
        self._insist_on_one_code()
        user_code.add_to_path(code)
        if spec.task is not None:
            loop.run_task(self._open(), user_code.make_task(spec.task, code))
            return
        assert spec.script is not None
        Session._opener = self._open
        threading.excepthook = self._thread_ended
        if unmanaged:
            if identity.rank == 0:
                environment_record.write(self._paths, package_list.installed())
            self._unmanaged.begin()
        try:
            self._run_script(spec.script, code)
        finally:
            self._unmanaged.over()

    def _insist_on_one_code(self) -> None:
        """Code that lies on the nodes is the same on all of them."""
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
                "on all of them, or leave code.source out, and the service hands out one snapshot",
                code="code-differs",
            )

    def _open(self, arguments: SessionArguments = SessionArguments()) -> Runtime:
        """Join the process group and agree on what to start from: once, on every rank. Tasks do it first of all, a script when
        it makes its Session. Raises ``Stopped`` where a stop was told to the script before."""
        with self._opening:
            if (odd := arguments.differences(self._launch.spec)) and self._identity.rank == 0:
                text = f"the job's spec counts, and the script gives other values: {', '.join(odd)}"
                self._reporter.note("session-arguments", text)
            if self._runtime is None:
                self._opener = threading.current_thread()
                self._runtime = self._join()
            return self._runtime

    def _join(self) -> Runtime:
        assert self._clients is not None and self._agreement is not None
        launch, identity = self._launch, self._identity
        stop = self._unmanaged.become_managed()
        if stop is not None:
            raise Stopped(stop, f"stopped before the first step ({stop})")
        hold = self._listener.abort.hold
        return join(
            launch, identity, self._clients, self._timeout, hold, self._agreement, self._counter, self._reporter
        )

    @property
    def _trainer(self) -> threading.Thread | None:
        """The thread that does the steps; before the first, the one that made the Session."""
        stepping = None if self._runtime is None else self._runtime.trainer
        return stepping or self._opener

    def _thread_ended(self, args: threading.ExceptHookArgs) -> None:
        """An exception has ended a thread of the script's. Python goes on without it; the attempt ends with that of the steps,
        wherever the main thread is. A script may set another hook: ``_finish`` needs none."""
        threading.__excepthook__(args)
        assert args.exc_value is not None
        error = self._judged(args.exc_value)
        if error is None:
            return
        if args.thread is self._trainer:
            leave_process(self._leave_by(error))
        self._thread_error = error

    def _exchange(self, client: Store, timeout: float | None = None) -> Exchange:
        identity, limit = self._identity, self._timeout if timeout is None else timeout
        return Exchange(client, identity.rank, identity.world_size, limit, self._listener.abort.hold)

    def _run_script(self, script: Sequence[str], code: Path) -> None:
        try:
            user_code.run_script(script, code)
        except BaseException as error:
            judged = self._judged(error)
            if judged is error:
                raise
            if judged is not None:
                raise judged from error

    def _judged(self, error: BaseException) -> BaseException | None:
        """What the attempt ends by, where ``error`` ended the script: None where that ``sys.exit`` is a success."""
        if isinstance(error, Stopped):
            return error
        if isinstance(error, SystemExit):
            return self._judged_exit(error)
        runtime, launch = self._runtime, self._launch
        trained = runtime is not None and runtime.step > runtime.chosen.base.step
        if isinstance(error, ModuleNotFoundError | SyntaxError) and not trained:
            assert launch.spec.script is not None
            code = Path(launch.code_dir or launch.workdir)
            return user_code.not_importable(f"script {launch.spec.script[0]!r}", error, code)
        return error

    def _judged_exit(self, exit_: SystemExit) -> Exception | None:
        runtime = self._runtime
        stopped = self._unmanaged.told is not None or (self._unmanaged.active and self._listener.terminated)
        if stopped:  # by its own handler
            return None
        if exit_.code not in (None, 0):
            return ScriptExit(exit_)
        if runtime is not None and runtime.restored and not (runtime.finished or runtime.done):
            return RuntimeError(
                f"the script called sys.exit after step {runtime.step}, before its loop had ended: that is no success. Leave "
                "the loop by `break`, and call sys.exit only behind the Session's block"
            )
        return None

    def _finish(self) -> None:
        """A script that ends without leaving its Session's block has come to its end, too; one whose steps are another thread's,
        when that thread has."""
        while self._may_train():
            time.sleep(0.02)
        if self._runtime is not None and self._runtime.restored:
            self._runtime.finish()
            return
        if not self._unmanaged.active:
            if self._thread_error is not None:
                raise self._thread_error
            if self._identity.rank == 0:
                self._reporter.note(
                    "no-session", "the script ended without a step of a Session: there is no checkpoint"
                )
            self._unmanaged.begin()
        # Rank 0 serves the store that the others may still need; a stop is heard meanwhile.
        assert self._clients is not None
        exchange = self._exchange(self._clients.main, math.inf)
        with suppress(Abandoned):
            exchange.gather("script-end", None, abandon=lambda: self._unmanaged.told is not None)

    def _may_train(self) -> bool:
        """Is another thread in the middle of the training, although the script's main thread has come to its end? Before the
        first step that may be any that Python itself would wait for."""
        runtime, here = self._runtime, threading.current_thread()
        if runtime is not None and (trainer := runtime.trainer) is not None:
            over = trainer.daemon and (runtime.finished or runtime.done)
            return trainer is not here and not over and at_work(trainer)
        return not self._unmanaged.active and any(
            thread is not here and (thread is self._opener or not thread.daemon) and at_work(thread)
            for thread in threading.enumerate()
        )

    def _listen(self, seconds: float) -> Wish:
        return Wish(*self._listener.wait(seconds))

    def _decided_early(self, decision: Decision) -> None:
        """On the side thread: something was decided before any step. Nothing was trained, the main thread may be anywhere."""
        if decision.stop is None:
            if self._identity.rank == 0:
                self._reporter.note(
                    "checkpoint-not-needed", "no step of a Session was done in this attempt: nothing to save"
                )
        elif not self._unmanaged.hand_over(decision.stop):
            self._leave_early(decision.stop)

    def _heed_early_stop(self) -> None:
        """An error may come from a rank that has left for a stop before this one's side thread knows of it: that stop is how this
        rank ends, too. Returns when there is none, or when the script was told of it; else the side thread ends the process."""
        if self._agreement is not None and self._agreement.stopped_early(_NEWS_SECONDS):
            while self._unmanaged.told is None:
                time.sleep(0.005)

    # --- the ways out --------------------------------------------------------------------------------------------------

    def _leave_by(self, error: BaseException) -> int:
        """The training ends by ``error``. Returns where all ranks leave together; on whichever thread did the steps."""
        self._listener.abort.hold()
        self._heed_early_stop()
        if self._unmanaged.told is not None:
            return self._leave_as_told(self._unmanaged.told, error)
        if not isinstance(error, Stopped):
            self._fail(error)
        code = EXIT_COMPLETED if error.cause is Cause.COMPLETED else EXIT_PREEMPTED
        return self._leave(error.cause, code, error.message)

    def _take_way_out(self) -> None:
        """Whichever thread comes first ends the process, and the others wait for that; but a thread of the script's ends, since
        Python's own end waits for it."""
        thread = threading.current_thread()
        if not self._way_out.acquire(blocking=thread is threading.main_thread() or thread.daemon):
            sys.exit()

    def _leave(self, cause: Cause, code: int, message: str | None) -> int:
        """All ranks end here together."""
        self._take_way_out()
        self._write_result(cause, message, None)
        assert self._agreement is not None
        self._agreement.close()
        self._reporter.close()
        try:
            if self._runtime is not None:
                close_group()
            else:  # what the script knows of the others is not ours to know: no collective
                self._part(_FAREWELL_SECONDS)
                if is_initialized():
                    destroy_process_group()
        except RuntimeError as error:  # another rank was killed on the way out; this one's result stands
            print(f"ratchet: leaving the group: {error}", file=sys.stderr, flush=True)
            leave_process(code)
        return code

    def _leave_as_told(self, cause: Cause, error: BaseException | None) -> int:
        """The script ended after its own handler was given the stop: however it ended, it is that stop. An exception may come
        from a collective with a rank that has left already."""
        message = "the script was given SIGTERM and ended by itself"
        if error is not None and not isinstance(error, SystemExit):
            message += f", with {type(error).__name__}: {error}"
            print(_traceback(error), file=sys.stderr, flush=True)
        with suppress(RuntimeError):
            if is_initialized():
                destroy_process_group()  # a rank that still waits for this one in a collective gets an error, and ends
        self._part(self._launch.spec.policy.stop_grace)
        return self._leave(cause, EXIT_PREEMPTED, message[:4000])

    def _fail(self, error: BaseException) -> NoReturn:
        """Without the other ranks, which may wait in a collective: their agent ends them."""
        self._take_way_out()
        cause, message = cause_of(error)
        trace = _traceback(error)
        with suppress(OSError):  # the log may lie on the disk that is full
            print(trace, file=sys.stderr, flush=True)
        self._write_result(cause, message, trace)
        self._reporter.close()
        leave_process(exit_code_of(error, cause))

    def _leave_early(self, cause: Cause) -> None:
        """From the side thread, wherever the main thread is."""
        self._take_way_out()
        message = f"stopped before the first step ({cause})"
        if self._unmanaged.told is not None:
            message = "the script was given SIGTERM and did not end within policy.stop_grace"
        elif self._unmanaged.active:
            message = "the script handles no SIGTERM and was ended"
            self._part(self._launch.spec.policy.stop_grace)  # other ranks' handlers may be at work
        self._write_result(cause, message, None)
        self._reporter.close()
        self._part(_FAREWELL_SECONDS)
        leave_process(EXIT_PREEMPTED)

    def _part(self, seconds: float) -> None:
        """The last use of the store by this rank; rank 0, which serves it, waits for the others' for up to ``seconds``."""
        if self._parted:
            return
        self._parted = True
        assert self._clients is not None
        farewell(self._clients.side, self._identity, seconds)

    def _write_result(self, cause: Cause, message: str | None, trace: str | None) -> None:
        self._listener.abort.hold()
        step = self._runtime.step if self._runtime is not None else 0
        write_result(
            self._paths,
            RankResult(
                rank=self._identity.rank, cause=cause, at=now(), last_step=step, message=message, traceback=trace
            ),
        )


def _traceback(error: BaseException) -> str:
    """Without the frames that only run the user's code, where that comes next. Of ``sys.exit``: where the script called it; where
    its ``argparse`` did, that has printed the usage already."""
    if isinstance(error, ScriptExit):
        if error.cause is Cause.USER_ERROR:
            return f"{error}\n"
        error = error.__cause__ or error
    first = error.__traceback__
    while first is not None and _runs_the_script(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    users = first is not None and is_users_module(str(first.tb_frame.f_globals.get("__name__")))
    return "".join(traceback.format_exception(type(error), error, first if users else error.__traceback__))


def _runs_the_script(file: str) -> bool:
    return file == "<frozen runpy>" or Path(file).is_relative_to(Path(__file__).parent)
