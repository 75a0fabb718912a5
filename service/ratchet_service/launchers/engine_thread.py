"""A launcher whose engine is called on a separate thread: an engine that hangs delays its own jobs, and no others.

The caller waits only briefly, and then gets ``EngineBusy``, later ``EngineUnreachable``. The caller repeats the call to get the
late answer, which is kept for a while.
"""

from __future__ import annotations

import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineBusy,
    EngineUnreachable,
    Launcher,
    LaunchPlan,
)

WAIT_SECONDS: Final = 2.0
"""Seconds that a caller waits at most for its answer, counted from the start of the call that is running on the engine."""
SLOW_WAIT_SECONDS: Final = 0.1
"""Used in place of ``WAIT_SECONDS`` for ``SLOW_SECONDS`` seconds after a call took longer than ``WAIT_SECONDS``."""
SLOW_SECONDS: Final = 60.0
UNREACHABLE_AFTER_SECONDS: Final = 10.0
"""Seconds without an answer after which the engine counts as unreachable."""
ABANDON_AFTER_SECONDS: Final = 5.0
"""A queued call that nobody has repeated for this many seconds is not started: its caller may no longer supervise the job."""
KEEP_ANSWER_SECONDS: Final = 10.0
"""Seconds for which a late answer is kept for its caller."""
REUSE_ANSWER_SECONDS: Final = 1.0
"""Seconds for which a late answer is reused after its first use: one supervision pass makes the same call twice, and must
complete even with a slow engine."""
REUSE_PROOF_SECONDS: Final = 60.0
"""Used in place of ``REUSE_ANSWER_SECONDS`` for a proof of death, which nothing revokes."""
_ATTEMPT_CALLS: Final = ("submit", "poll", "stop", "kill", "logs")
_ACTIONS: Final = ("submit", "stop", "kill")

T = TypeVar("T")
Key = tuple[str, str]
"""The call's kind, and the attempt's name."""


@dataclass(eq=False)
class _Call:
    """One call on the engine. ``must_run``: the call is made even if its caller does not repeat it. ``keep_seconds``: how long a
    late answer is kept until its first use. ``reuse_until``: until when (monotonic) a late answer may be used again after its
    first use."""

    key: Key
    run: Callable[[], Any]
    created_at: float
    last_requested_at: float
    must_run: bool
    keep_seconds: float
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    answer: Future[Any] = field(default_factory=Future)
    done_at: float = math.inf
    reuse_until: float | None = None

    def is_stale(self, now: float) -> bool:
        """True if the call is answered and the answer is too old to be used."""
        return self.answer.done() and now > (
            self.done_at + self.keep_seconds if self.reuse_until is None else self.reuse_until
        )


class CallQueue:
    """Calls on one engine, which a thread makes one at a time. ``name``: the launcher's name, for messages. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._calls: dict[Key, _Call] = {}
        self._queue: deque[_Call] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._busy_since: float | None = None
        self._slow_until = -math.inf

    def call(
        self,
        key: Key,
        run: Callable[[], T],
        *,
        must_run: bool = False,
        keep_seconds: float | None = None,
        is_final: Callable[[T], bool] = lambda _: False,
    ) -> T:
        """Run ``run`` on the engine's thread and return its result or raise its error. If an earlier call with the same key still
        has no answer, this call waits for that answer. If the answer of an earlier call came late and is still kept, it is used.
        Raises ``EngineBusy`` or ``EngineUnreachable`` if there is no answer yet: the caller repeats the call.

        ``must_run``: the call is made even if not repeated, unless a later action discards it. ``keep_seconds``: how long a late
        answer is kept. ``is_final``: returns True for an answer that stays valid; such an answer, if late, is used again for
        ``REUSE_PROOF_SECONDS``.
        """
        now = time.monotonic()
        with self._changed:
            call = self._calls.get(key)
            is_repeated = call is not None and not call.is_stale(now)
            if call is None or not is_repeated:
                call = self._add(
                    _Call(key, run, now, now, must_run, KEEP_ANSWER_SECONDS if keep_seconds is None else keep_seconds)
                )
            call.last_requested_at = now
            timeout = self._wait_seconds(now)
        wait((call.answer,), timeout)
        with self._changed:
            if not call.answer.done():
                self._raise_unanswered(time.monotonic() - call.created_at)
            if not is_repeated and self._calls.get(key) is call:
                del self._calls[key]
            elif call.reuse_until is None:
                proved = call.answer.exception() is None and is_final(call.answer.result())
                call.reuse_until = time.monotonic() + (REUSE_PROOF_SECONDS if proved else REUSE_ANSWER_SECONDS)
        answer: T = call.answer.result()
        return answer

    def close(self) -> None:
        """Start no further calls, and wait at most 5 s for the one that is running."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=5)

    def _add(self, call: _Call) -> _Call:
        """Put a new call into the queue. An action on an attempt discards the attempt's earlier calls. Called with
        the lock held."""
        what, attempt = call.key
        if not self._queue:  # drop answers that nobody fetched
            self._calls = {key: kept for key, kept in self._calls.items() if not kept.is_stale(call.created_at)}
        if what in _ACTIONS:
            for other in _ATTEMPT_CALLS:
                before = self._calls.pop((other, attempt), None)
                if before is not None:  # if it has not started yet, it never will
                    before.must_run, before.last_requested_at = False, -math.inf
        self._calls[call.key] = call
        self._queue.append(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_loop, name=f"engine-{self._name}", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return call

    def _wait_seconds(self, now: float) -> float:
        """Return how many seconds from ``now`` a caller may wait; less for a while after a slow call."""
        since = now if self._busy_since is None else self._busy_since
        return max(0.0, since + (SLOW_WAIT_SECONDS if now < self._slow_until else WAIT_SECONDS) - now)

    def _raise_unanswered(self, seconds: float) -> None:
        """Raise the error for a call that has had no answer for ``seconds``: ``EngineBusy``, later ``EngineUnreachable``."""
        if seconds < UNREACHABLE_AFTER_SECONDS:
            raise EngineBusy(f"the launcher {self._name} has not responded yet")
        raise EngineUnreachable(f"the launcher {self._name} has not answered within {UNREACHABLE_AFTER_SECONDS:g} s")

    def _run_loop(self) -> None:
        """Run the queued calls one after the other, until the queue is closed."""
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                call = self._queue.popleft()
                began = time.monotonic()
                if not call.must_run and began - call.last_requested_at > ABANDON_AFTER_SECONDS:
                    self._abandon(call)
                    continue
                self._busy_since = began
            answer: Any = None
            error: BaseException | None = None
            try:
                answer = call.context.run(call.run)
            except BaseException as raised:  # it is raised in the caller
                error = raised
            with self._changed:
                self._busy_since, call.done_at = None, time.monotonic()
                if call.done_at - began > WAIT_SECONDS:
                    self._slow_until = call.done_at + SLOW_SECONDS
                if error is None:
                    call.answer.set_result(answer)
                else:
                    call.answer.set_exception(error)

    def _abandon(self, call: _Call) -> None:
        """Drop a call that has not begun, and make ``EngineBusy`` its answer. Called with the lock held."""
        if self._calls.get(call.key) is call:
            del self._calls[call.key]
        call.answer.set_exception(EngineBusy(f"the launcher {self._name} was not called: the deadline had passed"))


class ThreadedLauncher:
    """A launcher that calls ``launcher`` through a ``CallQueue``. A call that raises ``EngineBusy`` or ``EngineUnreachable`` may
    still run later."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._call_queue = CallQueue(launcher.kind)
        self.kind = launcher.kind
        self.max_nodes = launcher.max_nodes
        self.slots = launcher.slots
        self.same_files = launcher.same_files
        self.excludes_nodes = launcher.excludes_nodes

    def close(self) -> None:
        """Close the queue of calls, and the launcher if it can be closed."""
        self._call_queue.close()
        close = getattr(self._launcher, "close", None)
        if close is not None:
            close()

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        """As ``Launcher.check``, in the caller's thread."""
        return self._launcher.check(spec)

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        """As ``Launcher.plan``, in the caller's thread."""
        return self._launcher.plan(launch)

    def submit(self, plan: LaunchPlan) -> None:
        """As ``Launcher.submit``, on the engine's thread. Raises ``EngineBusy`` or, later, ``EngineUnreachable`` while there
        is not an answer: repeat the call to get it. The call may be made even if not repeated."""
        self._call_queue.call(("submit", plan.ref.name), partial(self._launcher.submit, plan))

    def poll(self, ref: AttemptRef) -> AttemptState:
        """As ``Launcher.poll``, on the engine's thread."""
        return self._call_queue.call(("poll", ref.name), partial(self._launcher.poll, ref))

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """As ``Launcher.stop``, on the engine's thread. The call is made even if not repeated, unless a later call
        discards it."""
        self._call_queue.call(("stop", ref.name), partial(self._launcher.stop, ref, grace), must_run=True)

    def kill(self, ref: AttemptRef) -> Sequence[str]:
        """As ``Launcher.kill``, on the engine's thread. A late empty result, the proof of death, is used again for longer."""
        return self._call_queue.call(
            ("kill", ref.name), partial(self._launcher.kill, ref), is_final=lambda left: not left
        )

    def logs(self, ref: AttemptRef, limit: int) -> str:
        """As ``Launcher.logs``, on the engine's thread."""
        return self._call_queue.call(("logs", ref.name), partial(self._launcher.logs, ref, limit))

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> Sequence[str]:
        """As ``Launcher.sweep``, on the engine's thread, which also calls ``known``. Raises ``EngineBusy`` or
        ``EngineUnreachable`` while the sweep has not finished."""
        return self._call_queue.call(("sweep", ""), partial(self._launcher.sweep, known), keep_seconds=math.inf)
