"""A rank's process from start to end: facts, rendezvous, base, the user's code, and a ``RankResult`` in every way out.

The result is written before the process leaves its group: the file's time tells which rank ended first.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import torch

from ratchet_contract.errors import CheckpointError, RatchetError, UserError
from ratchet_contract.exit_codes import (
    EXIT_CHECKPOINT_ERROR,
    EXIT_COMPLETED,
    EXIT_EXCEPTION,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
)
from ratchet_contract.messages import LaunchFile, RankResult
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.phases import Cause
from ratchet_hooks.build import close_group
from ratchet_worker import determinism, loop, rng, user_code
from ratchet_worker.agreement import Agreement, Decision, Wish
from ratchet_worker.counter import StepCounter
from ratchet_worker.exchange import Exchange
from ratchet_worker.files import now
from ratchet_worker.group import Clients, Identity, connect, device_of, join
from ratchet_worker.listener import Listener
from ratchet_worker.reporter import Reporter
from ratchet_worker.restore import choose
from ratchet_worker.results import write_rank_result
from ratchet_worker.runtime import Runtime, Stopped, current
from ratchet_worker.spool import Spool

_FAREWELL_SECONDS: Final = 3.0
_EXIT_CODES: Final = {
    Cause.USER_ERROR: EXIT_USER_ERROR,
    Cause.CHECKPOINT_ERROR: EXIT_CHECKPOINT_ERROR,
    Cause.OOM: EXIT_EXCEPTION,
    Cause.EXCEPTION: EXIT_EXCEPTION,
}


class RankProcess:
    """Made once per process, on its main thread."""

    def __init__(self, launch: LaunchFile, listener: Listener) -> None:
        self._launch, self._listener = launch, listener
        self._identity = Identity.of(os.environ)
        self._paths = AttemptPaths(Path(launch.attempt_dir))
        self._counter = StepCounter.create(self._paths.counter(self._identity.rank))
        self._reporter = Reporter(Spool(self._paths.spool(self._identity.rank)), self._identity.rank)
        self._clients: Clients | None = None
        self._agreement: Agreement | None = None
        self._runtime: Runtime | None = None

    def execute(self) -> int:
        """Run to the end. Returns the exit code of an end that all ranks share; otherwise does not return."""
        try:
            self._run()
            self._finish()
        except Stopped as stop:
            return self._leave(stop.cause, EXIT_PREEMPTED, stop.message)
        except BaseException as error:
            self._fail(error)
        return self._leave(Cause.COMPLETED, EXIT_COMPLETED, None)

    # --- the way in ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        launch, identity = self._launch, self._identity
        self._listener.follow(self._paths.control_file, launch.desired)
        determinism.set_library_variables(launch.spec.determinism)
        determinism.apply(launch.spec.determinism, launch.resolved.threads_per_rank)
        device = device_of(launch, identity)
        rng.seed_all(launch.spec.seed, identity.rank)
        self._reporter.started(str(device), torch.__version__)
        # The agent's deadlines come first: a hang is to be told as a hang, not as a broken collective.
        timeout = max(launch.spec.policy.startup_deadline, launch.spec.policy.step_deadline) + 30
        self._clients = connect(identity, timeout)
        self._agreement = Agreement(
            self._clients.side, identity.rank, identity.world_size, self._listen, self._leave_early
        )
        self._agreement.start()
        self._counter.tick()
        join(launch, identity, self._clients, device, timeout)
        self._counter.tick()
        exchange = Exchange(self._clients.main, identity.rank, identity.world_size, timeout)
        chosen = choose(launch, exchange, self._reporter)
        self._counter.tick()
        self._runtime = Runtime(
            launch, identity.local_rank, device, exchange, self._agreement, self._counter, self._reporter, chosen
        )
        current.set(self._runtime)
        self._run_user_code(self._runtime)

    def _run_user_code(self, runtime: Runtime) -> None:
        spec, workdir = self._launch.spec, Path(self._launch.workdir)
        user_code.add_to_path(workdir)
        if spec.task is not None:
            loop.run_task(runtime, user_code.make_task(spec.task, workdir))
            return
        assert spec.script is not None
        try:
            user_code.run_script(spec.script, workdir)
        except Stopped:
            raise
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                raise RuntimeError(f"the script ended with sys.exit({exit_.code!r})") from exit_
            if runtime.restored and not (runtime.finished or runtime.done):
                raise RuntimeError(
                    f"the script called sys.exit after step {runtime.step}, before its loop had ended: that is no success. Leave "
                    "the loop by `break`, and call sys.exit only behind the Session's block"
                ) from exit_

    def _finish(self) -> None:
        """A script that ends without leaving its Session's block has come to its end, too."""
        assert self._runtime is not None
        if self._runtime.restored:
            self._runtime.finish()
        elif self._identity.rank == 0:
            self._reporter.note("no-session", "the script ended without a step of a Session: there is no checkpoint")

    def _listen(self, seconds: float) -> Wish:
        return Wish(*self._listener.wait(seconds))

    # --- the ways out --------------------------------------------------------------------------------------------------

    def _leave(self, cause: Cause, code: int, message: str | None) -> int:
        """All ranks end here together."""
        self._write_result(cause, message, None)
        assert self._agreement is not None
        self._agreement.close()
        self._reporter.close()
        try:
            close_group()
        except RuntimeError as error:  # another rank was killed on the way out; this one's result stands
            print(f"ratchet: leaving the group: {error}", file=sys.stderr, flush=True)
            _exit(code)
        return code

    def _fail(self, error: BaseException) -> NoReturn:
        """Without the other ranks, which may wait in a collective: their agent ends them."""
        cause, message = _cause_of(error)
        trace = "".join(traceback.format_exception(error))
        print(trace, file=sys.stderr, flush=True)
        self._write_result(cause, message, trace)
        self._reporter.close()
        _exit(_EXIT_CODES[cause])

    def _leave_early(self, decision: Decision) -> None:
        """A stop before any step, on the side thread: nothing was trained, the main thread may be anywhere."""
        assert decision.stop is not None and self._clients is not None
        self._write_result(decision.stop, f"stopped before the first step ({decision.stop})", None)
        self._reporter.close()
        store, rank = self._clients.side, self._identity.rank
        with suppress(RuntimeError):  # rank 0 has gone already
            store.set(f"farewell/{rank}", "1")
        if rank == 0:
            keys = [f"farewell/{r}" for r in range(self._identity.world_size)]
            end = time.monotonic() + _FAREWELL_SECONDS
            while not store.check(keys) and time.monotonic() < end:
                time.sleep(0.005)
        _exit(EXIT_PREEMPTED)

    def _write_result(self, cause: Cause, message: str | None, trace: str | None) -> None:
        step = self._runtime.step if self._runtime is not None else 0
        result = RankResult(
            rank=self._identity.rank, cause=cause, at=now(), last_step=step, message=message, traceback=trace
        )
        try:
            write_rank_result(self._paths.rank_result(self._identity.rank), result)
        except OSError as error:
            print(f"ratchet: the result could not be written: {error}", file=sys.stderr, flush=True)


def _cause_of(error: BaseException) -> tuple[Cause, str]:
    """Cause and a sentence."""
    if isinstance(error, UserError):
        return Cause.USER_ERROR, error.detail
    if isinstance(error, CheckpointError):
        return Cause.CHECKPOINT_ERROR, error.detail
    if isinstance(error, SystemExit):
        return Cause.EXCEPTION, f"the user's code called sys.exit({error.code!r}) in the middle of its work"
    text = error.detail if isinstance(error, RatchetError) else f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Cause.OOM, f"out of memory: {text}"
    return Cause.EXCEPTION, text[:4000]


def _exit(code: int) -> NoReturn:
    """Without destructors: torn down carelessly, torch's threads abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
