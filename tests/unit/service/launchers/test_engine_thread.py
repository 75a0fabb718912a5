"""What a launcher that is set apart answers while its engine hangs, and behind that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import FieldProblem
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec
from ratchet_service.launchers import engine_thread
from ratchet_service.launchers.base import (
    AttemptRef,
    AttemptState,
    EngineBusy,
    EngineUnreachable,
    LaunchError,
    LaunchPlan,
)
from ratchet_service.launchers.engine_thread import ThreadedLauncher
from tests.support.server import wait_for

DEADLINE = 30.0


class Engine:
    """``hangs``: what is asked now waits for ``going``, and has begun once ``waits`` is set; the answer was true when it was
    asked. ``asked``: in the order in which it was."""

    kind, max_nodes, slots, same_files, excludes_nodes = "slow", None, False, False, False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hangs = False
        self.waits, self.going = threading.Event(), threading.Event()
        self.alive = False
        self.refusal: Exception | None = None
        self.left: list[str] = []
        self.closed = False

    def check(self, spec: JobSpec) -> tuple[list[Warning_], list[FieldProblem]]:
        return [], []

    def plan(self, launch: LaunchFile) -> LaunchPlan:
        raise NotImplementedError

    def submit(self, plan: LaunchPlan) -> None:
        self._take(f"submit {plan.ref.attempt}", None)
        if self.refusal is not None:
            raise self.refusal
        self.alive = True

    def poll(self, ref: AttemptRef) -> AttemptState:
        return AttemptState(bool(self._take(f"poll {ref.attempt}", self.alive)))

    def stop(self, ref: AttemptRef, grace: float) -> None:
        self._take(f"stop {ref.attempt}", None)

    def kill(self, ref: AttemptRef) -> list[str]:
        left: list[str] = self._take(f"kill {ref.attempt}", list(self.left))
        return left

    def logs(self, ref: AttemptRef, limit: int) -> str:
        return str(self._take(f"logs {ref.attempt}", "words"[:limit]))

    def sweep(self, known: Callable[[Collection[str]], Collection[str]]) -> list[str]:
        found: list[str] = self._take("sweep", ["orphan"])
        return sorted(set(found) - set(known(found)))

    def close(self) -> None:
        self.closed = True

    def _take(self, what: str, answer: Any) -> Any:
        self.asked.append(what)
        if self.hangs:
            self.waits.set()
            assert self.going.wait(DEADLINE)
        return answer


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def launcher(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedLauncher]:
    monkeypatch.setattr(engine_thread, "WAIT_SECONDS", DEADLINE)
    monkeypatch.setattr(engine_thread, "SLOW_WAIT_SECONDS", DEADLINE)
    made = ThreadedLauncher(engine)
    yield made
    engine.going.set()
    made.close()
    assert engine.closed


def ref(attempt: int = 1) -> AttemptRef:
    return AttemptRef("job-000000000001", attempt, AttemptPaths(Path("/nowhere")))


def plan(attempt: int = 1) -> LaunchPlan:
    return LaunchPlan(ref(attempt), None, ())  # type: ignore[arg-type]


def begin_to_hang(launcher: ThreadedLauncher, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempt 9 is asked about, and nobody waits for it."""
    engine.hangs = True
    monkeypatch.setattr(engine_thread, "WAIT_SECONDS", 0.01)
    with pytest.raises(EngineBusy):
        launcher.poll(ref(9))
    assert engine.waits.wait(DEADLINE)


def answered(call: Callable[[], Any]) -> Any:
    """The answer once it is there."""
    got: list[Any] = []

    def ask() -> bool:
        try:
            got.append(call())
        except EngineBusy:
            return False
        return True

    wait_for(ask, "an answer", DEADLINE)
    return got[0]


def go_on(engine: Engine) -> None:
    engine.hangs = False
    engine.going.set()


def test_responsive_engine_receives_every_call(launcher: ThreadedLauncher, engine: Engine) -> None:
    assert not launcher.poll(ref()).alive
    launcher.submit(plan())
    assert launcher.poll(ref()).alive
    assert launcher.logs(ref(), 3) == "wor" and launcher.kill(ref()) == [] == launcher.kill(ref())
    launcher.stop(ref(), 5)
    assert launcher.sweep(lambda names: []) == ["orphan"] and launcher.sweep(lambda names: names) == []
    told = ["poll 1", "submit 1", "poll 1", "logs 1", "kill 1", "kill 1", "stop 1", "sweep", "sweep"]
    assert engine.asked == told


def test_engine_errors_propagate_and_log_context_is_kept(launcher: ThreadedLauncher, engine: Engine) -> None:
    engine.refusal = LaunchError("no such partition")
    with pytest.raises(LaunchError, match="no such partition"):
        launcher.submit(plan())
    job: ContextVar[str] = ContextVar("job", default="none")
    seen: list[tuple[str, str]] = []

    def known(names: Collection[str]) -> list[str]:
        seen.append((job.get(), threading.current_thread().name))
        return []

    job.set("job-1")
    launcher.sweep(known)
    assert seen == [("job-1", "engine-slow")]


def test_hanging_engine_raises_busy_and_late_answer_is_returned_on_retry(
    launcher: ThreadedLauncher, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_to_hang(launcher, engine, monkeypatch)
    for _ in range(50):
        for attempt in (9, 1, 2):
            with pytest.raises(EngineBusy):
                launcher.poll(ref(attempt))
    assert engine.asked == ["poll 9"]
    engine.alive = True
    go_on(engine)
    assert answered(lambda: launcher.poll(ref(1))).alive
    assert not answered(lambda: launcher.poll(ref(9))).alive, "the answer of then"
    assert engine.asked.count("poll 9") == 1 == engine.asked.count("poll 1")


def test_hanging_engine_becomes_unreachable_after_delay(
    launcher: ThreadedLauncher, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_to_hang(launcher, engine, monkeypatch)
    monkeypatch.setattr(engine_thread, "UNREACHABLE_AFTER_SECONDS", 0.0)
    with pytest.raises(EngineUnreachable, match="slow has not answered") as told:
        launcher.poll(ref(9))
    assert not isinstance(told.value, EngineBusy)


def test_poll_started_before_submit_is_not_used_after_submit(
    launcher: ThreadedLauncher, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a group that was just started would be taken for one that is gone."""
    begin_to_hang(launcher, engine, monkeypatch)
    with pytest.raises(EngineBusy):
        launcher.submit(plan(9))
    go_on(engine)
    answered(lambda: launcher.submit(plan(9)))
    assert answered(lambda: launcher.poll(ref(9))).alive
    assert engine.asked == ["poll 9", "submit 9", "poll 9"]


def test_late_launch_error_of_submit_is_raised_on_retry(
    launcher: ThreadedLauncher, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_to_hang(launcher, engine, monkeypatch)
    engine.refusal = LaunchError("no such partition")
    with pytest.raises(EngineBusy):
        launcher.submit(plan())
    go_on(engine)
    with pytest.raises(LaunchError, match="no such partition"):
        answered(lambda: launcher.submit(plan()))


def test_multi_call_sequence_completes_with_late_answers(
    launcher: ThreadedLauncher, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the reconciler ends an attempt: a look, the proof of death, another look, words; from the beginning each time."""
    monkeypatch.setattr(engine_thread, "WAIT_SECONDS", -1.0)  # never waited for
    monkeypatch.setattr(engine_thread, "SLOW_WAIT_SECONDS", -1.0)
    monkeypatch.setattr(engine_thread, "REUSE_ANSWER_SECONDS", DEADLINE)

    def ended() -> str:
        launcher.poll(ref())
        assert launcher.kill(ref()) == []
        launcher.poll(ref())
        return launcher.logs(ref(), 100)

    assert answered(ended) == "words"
    assert "poll 1" in engine.asked[engine.asked.index("kill 1") :], "the last look is behind the proof"


def test_stale_engine_calls_are_dropped_except_stop(
    launcher: ThreadedLauncher, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_to_hang(launcher, engine, monkeypatch)
    for call in (lambda: launcher.submit(plan(1)), lambda: launcher.kill(ref(2)), lambda: launcher.stop(ref(3), 5)):
        with pytest.raises(EngineBusy):
            call()
    monkeypatch.setattr(engine_thread, "ABANDON_AFTER_SECONDS", -1.0)
    go_on(engine)
    wait_for(lambda: "stop 3" in engine.asked, "the stop", DEADLINE)
    assert engine.asked == ["poll 9", "stop 3"]


def test_late_sweep_result_is_returned_by_next_sweep(
    launcher: ThreadedLauncher, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.hangs = True
    monkeypatch.setattr(engine_thread, "WAIT_SECONDS", 0.01)
    with pytest.raises(EngineBusy):
        launcher.sweep(lambda names: [])
    assert engine.waits.wait(DEADLINE)
    monkeypatch.setattr(engine_thread, "KEEP_ANSWER_SECONDS", -1.0)
    go_on(engine)
    assert answered(lambda: launcher.sweep(lambda names: names)) == ["orphan"]
    assert engine.asked == ["sweep"]
