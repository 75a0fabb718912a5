"""The nice values of the threads of a save, as Linux reports them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ratchet_worker.checkpoint.threads import BackgroundThread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a nice value per thread")
OWN = os.getpriority(os.PRIO_PROCESS, 0)


def nice_value() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_background_thread_has_raised_nice_value(quiet: bool) -> None:
    assert BackgroundThread("test", quiet=quiet).submit(nice_value).result() == min(OWN + 5 * quiet, 19)
    assert nice_value() == OWN, "the thread that trains has another nice value"


_ROOT = Path(__file__).parents[4]
_NICE_JOB = """
import os, threading
from ratchet_worker.checkpoint.threads import raise_nice_value
own = os.nice(17)
raise_nice_value()
print(own, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), flush=True)
os._exit(0)  # the end of an interpreter with torch takes long at this nice value
"""


def test_nice_value_is_raised_from_that_of_the_job() -> None:
    """Up to 19, the largest one: a job under ``nice`` stays below other processes."""
    ended = subprocess.run(
        [sys.executable, "-c", _NICE_JOB], check=True, capture_output=True, text=True, timeout=120, cwd=_ROOT
    )
    own, raised = map(int, ended.stdout.split())
    assert raised == min(own + 5, 19)


def test_background_thread_works_when_priority_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's filter refuses it; a mock, since there is none here."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refused)
    assert BackgroundThread("test", quiet=True).submit(lambda: 7).result() == 7
