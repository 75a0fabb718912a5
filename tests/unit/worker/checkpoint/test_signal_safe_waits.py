"""A training's signal handlers may raise at any moment, also while the loop waits for a save, or makes a part of it."""

from __future__ import annotations

import dis
import gc
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final

import pytest
import torch

from ratchet_contract.errors import StateError
from ratchet_worker.checkpoint import host_copy, threads
from ratchet_worker.checkpoint.copy_sources import Source, Sources
from ratchet_worker.checkpoint.host_copy import Staged, Staging
from ratchet_worker.checkpoint.save import Progress, SaveState
from ratchet_worker.checkpoint.threads import Signal
from ratchet_worker.state.snapshot import Until
from tests.support.server import wait_for

pytestmark = pytest.mark.usefixtures("no_small_tensors")


class _Interrupted(Exception):
    pass


_HANDLERS_RUN_BEHIND: Final = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_KW", "CALL_FUNCTION_EX"}
"""Instructions. (Between a lock that was taken and the block of its ``with`` is none, nor between the block and its end.)"""


def _raising_at(place: int) -> Any:
    """A trace function that raises at the so-manyth place where CPython runs handlers of signals in this thread."""
    count, last = 0, dict[FrameType, str]()

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        frame.f_trace = trace  # Python 3.13 traces the opcodes of a frame from here on
        if kind == "opcode":
            count += last.get(frame) in _HANDLERS_RUN_BEHIND
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if count == place:
                raise _Interrupted
        return trace

    return trace


def _interrupted(work: Callable[[], object], place: int) -> bool:
    """``work()`` with an exception at one of these places; False where it has fewer.

    The collector rests meanwhile: its callbacks (hypothesis has one) run wherever it is due, and what is raised in them
    reaches nobody.
    """
    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    try:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 traces opcodes if a frame wanted that before settrace
        sys.settrace(_raising_at(place))
        work()
    except _Interrupted:
        return True
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return False


def _staged(cores: int) -> Staged:
    tensors = [torch.full((64,), float(number)) for number in range(3)]
    sources = [Source(f"shared/model/{i}", t, 0, t.numel(), Until.STEP) for i, t in enumerate(tensors)]
    return Staging(torch.device("cpu"), cores).stage(Sources(sources))


def _finish(staged: Staged) -> None:
    try:
        staged.finish()
    except StateError as error:
        assert "interrupted" in str(error)


def _begun(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _both(staged: Staged) -> list[threading.Thread]:
    """The saving thread, and the loop again."""
    return [_begun(lambda: _finish(staged)), _begun(lambda: staged.wait(Until.STEP))]


def _ended(threads: list[threading.Thread], where: str) -> None:
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), where


@pytest.mark.parametrize("cores", [1, 2])
def test_interrupt_anywhere_in_own_copy_part_causes_no_deadlock(cores: int) -> None:
    """Wherever a handler may run. It goes on, and waits for the same copy again."""
    place, going_on = 0, True
    while going_on:
        place += 1
        staged = _staged(cores)
        going_on = _interrupted(partial(staged.wait, Until.STEP), place)
        _ended(_both(staged), f"interrupted at place {place} of what it did")
    assert place > 30


class _Waiters(list[Any]):
    """A signal's waiting threads. ``closed`` is opened as soon as the loop's thread is one of them."""

    def __init__(self, closed: Any) -> None:
        super().__init__()
        self._closed = closed

    def append(self, waiter: Any) -> None:
        super().append(waiter)
        if threading.current_thread() is threading.main_thread():
            _open(self._closed)


def _closed() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _open(closed: Any) -> None:
    if closed.locked():
        closed.release()


def _pass(closed: Any) -> None:
    assert closed.acquire(timeout=10)
    closed.release()


def test_interrupt_while_waiting_for_other_copy_part_causes_no_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, place, going_on = host_copy._copy_bytes, 0, True
    while going_on:
        place += 1
        staged, begun, closed = _staged(2), _closed(), _closed()

        def move(*to_from_bytes: Any, begun: Any = begun, closed: Any = closed) -> None:
            _open(begun)
            _pass(closed)
            real(*to_from_bytes)

        monkeypatch.setattr(host_copy, "_copy_bytes", move)
        monkeypatch.setattr(staged._signal, "_waiters", _Waiters(closed))
        saves = _begun(partial(_finish, staged))
        _pass(begun)
        going_on = _interrupted(partial(staged.wait, Until.STEP), place)
        _open(closed)
        _ended([saves, *_both(staged)], f"interrupted at place {place} of what it did")
    assert place > 20


class _Flag:
    """Something to wait for."""

    def __init__(self) -> None:
        self.signal, self.is_set = Signal(), False

    def set(self) -> None:
        self.is_set = True
        self.signal.notify()

    def wait(self, timeout: float | None = None) -> bool:
        return self.signal.wait_for(lambda: self.is_set, timeout)


def test_signal_interrupted_during_notify_stays_usable() -> None:
    place, going_on = 0, True
    while going_on:
        place += 1
        flag = _Flag()
        others = [_begun(flag.wait), _begun(flag.wait)]
        going_on = _interrupted(flag.set, place)
        flag.set()
        _ended(others, f"interrupted at place {place}")
        assert flag.is_set and flag.wait(0)
    assert place > 3


def test_signal_interrupted_during_wait_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def setting(flag: _Flag, closed: Any) -> None:
        _pass(closed)
        flag.set()

    place, going_on = 0, True
    while going_on:
        place += 1
        flag, closed = _Flag(), _closed()
        monkeypatch.setattr(flag.signal, "_waiters", _Waiters(closed))
        others = [_begun(flag.wait), _begun(partial(setting, flag, closed))]
        going_on = _interrupted(flag.wait, place)
        _open(closed)
        _ended(others, f"interrupted at place {place}")
        assert flag.is_set and flag.wait(0)
    assert place > 8


def test_signal_wakes_every_waiter_whose_condition_holds_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_POLL_SECONDS", 60.0)
    signal, reached = Signal(), [0]
    waiting = [_begun(partial(signal.wait_for, lambda least=least: reached[0] >= least)) for least in (1, 1, 2)]
    wait_for(lambda: len(signal._waiters) == 3, "three threads to wait")
    reached[0] = 1
    signal.notify()
    _ended(waiting[:2], "the first two")
    waiting[2].join(0.1)
    assert waiting[2].is_alive()
    reached[0] = 2
    signal.notify()
    _ended(waiting[2:], "the third")
    assert signal._waiters == []


def test_signal_wait_respects_timeout() -> None:
    flag = _Flag()
    assert not flag.wait(0) and not flag.wait(0.01)
    flag.set()
    flag.set()
    assert flag.wait() and flag.wait(0)


def test_save_never_goes_back_to_an_earlier_state() -> None:
    """The thread that compares replicas may be late: the save has failed meanwhile."""
    progress = Progress()
    progress.advance(SaveState.RETAINING)
    progress.advance(SaveState.WRITING)
    assert progress.state is SaveState.RETAINING and progress.wait_for(SaveState.WRITING, 0)
    assert not progress.wait_for(SaveState.ENDED, 0.01)
