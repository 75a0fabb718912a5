"""Signals that end a command as Ctrl-C does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ratchet_client.cli.shared.signals import interruptible

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _harmless_signals() -> Iterator[None]:
    before = [signal.signal(number, lambda *_: None) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_of_a_closed_terminal_interrupts_like_ctrl_c(number: signal.Signals) -> None:
    with interruptible(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_closed_terminal_is_ignored_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible():
        os.kill(os.getpid(), signal.SIGHUP)
