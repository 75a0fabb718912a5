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
from ratchet_worker.checkpoint import host_copy
from ratchet_worker.checkpoint.copy_sources import Source, Sources
from ratchet_worker.checkpoint.host_copy import Staged, Staging
from ratchet_worker.checkpoint.threads import Latch
from ratchet_worker.state.snapshot import Until

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


class _Waking:
    """A latch's lock. ``closed`` is opened as soon as the loop's thread waits here."""

    def __init__(self, lock: Any, closed: Any) -> None:
        self._lock, self._closed, self.release = lock, closed, lock.release

    def acquire(self, timeout: float) -> bool:
        if threading.current_thread() is threading.main_thread():
            _open(self._closed)
        return bool(self._lock.acquire(timeout=timeout))


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
        latch = staged._copied[Until.STEP]
        monkeypatch.setattr(latch, "_lock", _Waking(latch._lock, closed))
        saves = _begun(partial(_finish, staged))
        _pass(begun)
        going_on = _interrupted(partial(staged.wait, Until.STEP), place)
        _open(closed)
        _ended([saves, *_both(staged)], f"interrupted at place {place} of what it did")
    assert place > 20


def test_latch_interrupted_during_set_stays_usable() -> None:
    place, going_on = 0, True
    while going_on:
        place += 1
        latch = Latch()
        others = [_begun(latch.wait), _begun(latch.wait)]
        going_on = _interrupted(latch.set, place)
        latch.set()
        _ended(others, f"interrupted at place {place}")
        assert latch.is_set() and latch.wait(0)
    assert place > 3


def test_latch_interrupted_during_wait_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def setting(latch: Latch, closed: Any) -> None:
        _pass(closed)
        latch.set()

    place, going_on = 0, True
    while going_on:
        place += 1
        latch, closed = Latch(), _closed()
        monkeypatch.setattr(latch, "_lock", _Waking(latch._lock, closed))
        others = [_begun(latch.wait), _begun(partial(setting, latch, closed))]
        going_on = _interrupted(latch.wait, place)
        _open(closed)
        _ended(others, f"interrupted at place {place}")
        assert latch.is_set() and latch.wait(0)
    assert place > 8


def test_latch_wait_respects_timeout() -> None:
    latch = Latch()
    assert not latch.wait(0) and not latch.wait(0.01)
    latch.set()
    latch.set()
    assert latch.wait() and latch.wait(0)
