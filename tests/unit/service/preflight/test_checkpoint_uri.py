"""The check of an object store runs on a thread with a time limit."""

from __future__ import annotations

import threading

import pytest

from ratchet_service.preflight.checkpoint_uri import _Fault, _with_deadline

LATE = _Fault("uri-not-reached", "no answer")


def test_error_of_the_probe_is_raised_and_is_no_timeout() -> None:
    def fails() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        _with_deadline(60.0, fails, LATE)


def test_probe_without_an_answer_in_time_gives_the_fault() -> None:
    end = threading.Event()
    try:
        assert _with_deadline(0.01, lambda: end.wait(60) and None, LATE) is LATE
    finally:
        end.set()
