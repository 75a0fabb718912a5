"""Makes SIGTERM and SIGHUP end a command as Ctrl-C does (``interruptible``), and keeps all three from interrupting
clean-up (``signals_ignored``)."""

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
    """Set ``handler`` for SIGINT, SIGTERM and SIGHUP during the block. An ignored SIGHUP (``nohup``) stays ignored."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number in _SIGNALS[: 2 if nohup else 3]}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def interruptible() -> AbstractContextManager[None]:
    """Return a context in which SIGINT, SIGTERM and SIGHUP raise ``KeyboardInterrupt``; SIGHUP stays ignored if it is ignored
    already (``nohup``)."""
    return _handled(_interrupt)


def signals_ignored() -> AbstractContextManager[None]:
    """Return a context in which SIGINT, SIGTERM and SIGHUP are ignored."""
    return _handled(signal.SIG_IGN)
