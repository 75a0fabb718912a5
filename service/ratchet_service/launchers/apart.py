"""A launcher whose engine is asked on a thread of its own: an engine that hangs holds up its own jobs, and no other's.

One call at a time, in the order in which they came. Who calls waits only for a moment (``BRIEF``), in which an engine that is
well has answered. A later answer is there for who calls again. Until then ``EngineBusy`` is raised, and after a while
``EngineUnreachable``: nothing is concluded meanwhile. What was asked before a deed (submit, stop, kill) tells nothing behind it.
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

from ratchet_contract.api import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.messages import LaunchFile
from ratchet_contract.spec import JobSpec
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineBusy,
    EngineUnreachable,
    Launcher,
    LaunchPlan,
)

BRIEF: Final = 2.0
"""Seconds that a call waits at most for its answer, counted from when the engine was given what it is at now."""
BRIEFER: Final = 0.1
"""Likewise, for ``SLOW_FOR`` seconds after the engine took longer than that."""
SLOW_FOR: Final = 60.0
TOLD_AFTER: Final = 10.0
"""Seconds of silence that are told of."""
WANTED: Final = 5.0
"""Seconds: what nobody has asked for again for so long is not begun any more. Whoever asked may not have the job by now."""
KEPT: Final = 10.0
"""Seconds that a late answer waits for who asked."""
SHARED: Final = 1.0
"""Seconds from its first use for which a late answer holds: one look asks twice, and must come to its end with a slow engine."""
PROVED: Final = 60.0
"""Likewise for a proof of death, which nothing revokes."""
_ABOUT_ATTEMPTS: Final = ("submit", "poll", "stop", "kill", "logs")
_DEEDS: Final = ("submit", "stop", "kill")

T = TypeVar("T")
Key = tuple[str, str]
"""What is asked, and the attempt's name."""


@dataclass(eq=False)
class _Call:
    """``lasting``: it is made even if nobody asks for it again; ``kept``: seconds that its late answer waits; ``until``: how long
    that holds once it was used."""

    key: Key
    run: Callable[[], Any]
    asked_at: float
    wanted_at: float
    lasting: bool
    kept: float
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    answer: Future[Any] = field(default_factory=Future)
    done_at: float = math.inf
    until: float | None = None

    def stale(self, now: float) -> bool:
        return self.answer.done() and now > (self.done_at + self.kept if self.until is None else self.until)


class Line:
    """Calls on one engine, made one after the other by a thread of their own. ``name``: of the launcher. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._calls: dict[Key, _Call] = {}
        self._queue: deque[_Call] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._busy_since: float | None = None
        self._slow_until = -math.inf

    def ask(
        self,
        key: Key,
        run: Callable[[], T],
        *,
        lasting: bool = False,
        kept: float | None = None,
        proves: Callable[[T], bool] = lambda _: False,
    ) -> T:
        """What ``run`` returns, or raises. A call of that key that is under way is waited for, and none is made beside it.
        ``kept``: seconds, in place of ``KEPT``; ``proves``: is the answer for good? Raises ``EngineBusy`` or
        ``EngineUnreachable`` where there is none yet."""
        now = time.monotonic()
        with self._changed:
            call = self._calls.get(key)
            late = call is not None and not call.stale(now)
            if call is None or not late:
                call = self._add(_Call(key, run, now, now, lasting, KEPT if kept is None else kept))
            call.wanted_at = now
            patience = self._patience(now)
        wait((call.answer,), patience)
        with self._changed:
            if not call.answer.done():
                self._silent(time.monotonic() - call.asked_at)
            if not late and self._calls.get(key) is call:
                del self._calls[key]
            elif call.until is None:
                proved = call.answer.exception() is None and proves(call.answer.result())
                call.until = time.monotonic() + (PROVED if proved else SHARED)
        answer: T = call.answer.result()
        return answer

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=5)

    def _add(self, call: _Call) -> _Call:
        what, attempt = call.key
        if not self._queue:  # answers that nobody has come for
            self._calls = {key: kept for key, kept in self._calls.items() if not kept.stale(call.asked_at)}
        if what in _DEEDS:
            for other in _ABOUT_ATTEMPTS:
                before = self._calls.pop((other, attempt), None)
                if before is not None:  # unless it has begun, it never will
                    before.lasting, before.wanted_at = False, -math.inf
        self._calls[call.key] = call
        self._queue.append(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"engine-{self._name}", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        return call

    def _patience(self, now: float) -> float:
        since = now if self._busy_since is None else self._busy_since
        return max(0.0, since + (BRIEFER if now < self._slow_until else BRIEF) - now)

    def _silent(self, seconds: float) -> None:
        if seconds < TOLD_AFTER:
            raise EngineBusy(f"the launcher {self._name} was asked and has not answered yet")
        raise EngineUnreachable(f"the launcher {self._name} has not answered within {TOLD_AFTER:g} s")

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                call = self._queue.popleft()
                began = time.monotonic()
                if not call.lasting and began - call.wanted_at > WANTED:
                    self._forget(call)
                    continue
                self._busy_since = began
            answer: Any = None
            error: BaseException | None = None
            try:
                answer = call.context.run(call.run)
            except BaseException as raised:  # it belongs to who asked
                error = raised
            with self._changed:
                self._busy_since, call.done_at = None, time.monotonic()
                if call.done_at - began > BRIEF:
                    self._slow_until = call.done_at + SLOW_FOR
                if error is None:
                    call.answer.set_result(answer)
                else:
                    call.answer.set_exception(error)

    def _forget(self, call: _Call) -> None:
        if self._calls.get(call.key) is call:
            del self._calls[call.key]
        call.answer.set_exception(EngineBusy(f"the launcher {self._name} was not asked: it was too late"))


class Apart:
    """``launcher``, whose calls on its engine are made by a ``Line``. ``plan`` and ``check`` ask no engine."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._line = Line(launcher.kind)
        self.kind = launcher.kind
        self.max_nodes = launcher.max_nodes
        self.slots = launcher.slots
        self.same_files = launcher.same_files

    def close(self) -> None:
        self._line.close()
        close = getattr(self._launcher, "close", None)
        if close is not None:
            close()

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        return self._launcher.check(spec)

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        return self._launcher.plan(launch)

    def submit(self, plan: LaunchPlan) -> None:
        self._line.ask(("submit", plan.ref.name), partial(self._launcher.submit, plan))

    def poll(self, ref: AttemptRef) -> AttemptState:
        return self._line.ask(("poll", ref.name), partial(self._launcher.poll, ref))

    def stop(self, ref: AttemptRef, grace: float) -> None:
        """The job's history says that it was done: it is done, however late, also where who asked is gone."""
        self._line.ask(("stop", ref.name), partial(self._launcher.stop, ref, grace), lasting=True)

    def kill(self, ref: AttemptRef) -> Sequence[str]:
        return self._line.ask(("kill", ref.name), partial(self._launcher.kill, ref), proves=lambda left: not left)

    def logs(self, ref: AttemptRef, limit: int) -> str:
        return self._line.ask(("logs", ref.name), partial(self._launcher.logs, ref, limit))

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> Sequence[str]:
        """``known`` is called by the line's thread. What a late one has ended is told by the next."""
        return self._line.ask(("sweep", ""), partial(self._launcher.sweep, known), kept=math.inf)
