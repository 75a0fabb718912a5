"""Makes SIGTERM and SIGHUP end a command as Ctrl-C does, so that it cleans up; the clean-up itself is not interrupted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number in _SIGNALS[: 2 if nohup else 3]}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def interruptible() -> AbstractContextManager[None]:
    """A context in which all three signals raise ``KeyboardInterrupt``, except SIGHUP if it is ignored already (``nohup``)."""
    return _handled(_interrupt)


def signals_ignored() -> AbstractContextManager[None]:
    """A context in which all three signals are ignored."""
    return _handled(signal.SIG_IGN)
