"""The check of an object store runs on a thread with a time limit."""

from __future__ import annotations

import sys
import threading

import pytest

from ratchet_contract.spec.parse import parse_spec
from ratchet_service.preflight.checkpoint_uri import _Fault, _with_deadline, check
from ratchet_service.preflight.report import Report

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


def test_uri_is_refused_with_the_command_that_installs_a_missing_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)  # as if the package were not installed
    report = Report()
    check(parse_spec({"name": "a", "task": {"entrypoint": "a:B"}, "checkpoint": {"uri": "s3://bucket"}}), report)
    (problem,) = report.problems
    assert (problem.pointer, problem.code) == ("/checkpoint/uri", "uri-no-client")
    assert "pip install 'ratchet-train[s3]'" in problem.detail
