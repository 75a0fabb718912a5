"""What Linux was told of the threads of a save, as it tells it itself."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from ratchet_worker.checkpoint.threads import BackgroundThread, set_long_time_slice
from tests.support.full_matrix import full
from tests.unit.worker.checkpoint.test_saving import RANKS, Group

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="asks by the system call's number of Linux on x86-64",
)


class Attributes(NamedTuple):
    size: int
    policy: int
    flags: int
    nice: int
    priority: int
    slice: int
    deadline: int
    period: int


def attributes(thread: int = 0) -> Attributes:
    """Of a thread, the present one by default."""
    found = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(315, thread, found, 48, 0) == 0
    return Attributes(*struct.unpack("=IIQiIQQQ", found.raw))


@pytest.fixture
def usual() -> Attributes:
    found = attributes()
    if not 0 < found.slice < 20_000_000:
        pytest.skip("run it on Linux 6.12 or newer, which tells threads' slices, and under the usual policy and slice")
    return found


@pytest.mark.parametrize("quiet", [False, True])
def test_background_thread_has_long_time_slice_and_lower_nice(usual: Attributes, quiet: bool) -> None:
    found = BackgroundThread("test", quiet=quiet).submit(attributes).result()
    assert found.slice == 20_000_000 > usual.slice
    assert (found.policy, found.nice) == (usual.policy, min(usual.nice + 5 * quiet, 19))
    assert attributes() == usual, "the thread that trains has another slice"


def test_saver_thread_has_long_time_slice(usual: Attributes, tmp_path: Path) -> None:
    before = {thread.native_id for thread in threading.enumerate()}
    group = Group(tmp_path)
    group.step(1)
    group.drain()  # so that all of them have begun
    new = [thread for thread in threading.enumerate() if thread.native_id not in before]
    savers = [attributes(thread.native_id) for thread in new if thread.name == "ratchet-saver" and thread.native_id]
    assert savers == [usual._replace(slice=20_000_000)] * RANKS


_ROOT = Path(__file__).parents[4]
_TOLD = """
import os, sys
from ratchet_worker.checkpoint.threads import raise_nice_value, set_long_time_slice
from tests.unit.worker.checkpoint.test_thread_priority import attributes
os.nice(17)
if sys.argv[1] == "idle":
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
before = attributes()
set_long_time_slice()
raise_nice_value()
print(*attributes(), before.slice, flush=True)
os._exit(0)  # the end of an interpreter with torch takes long at this nice value
"""


@pytest.mark.parametrize(("policy", "number"), [("other", 0), pytest.param("idle", 5, marks=full)])
def test_user_nice_and_scheduling_policy_are_kept(usual: Attributes, policy: str, number: int) -> None:
    """A job under ``nice`` is not lifted, and a policy that has no slice is left alone."""
    told = subprocess.run(
        [sys.executable, "-c", _TOLD, policy], check=True, capture_output=True, text=True, timeout=120, cwd=_ROOT
    )
    *found, slice_before = map(int, told.stdout.split())
    after = Attributes(*found)
    assert (after.policy, after.nice) == (number, 19)
    assert after.slice == (20_000_000 if policy == "other" else slice_before)


def test_time_slice_is_unchanged_on_unknown_architecture(usual: Attributes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "sparc64")
    seen = []

    def late() -> None:
        set_long_time_slice()
        seen.append(attributes())

    thread = threading.Thread(target=late)
    thread.start()
    thread.join(20)
    assert seen == [usual]


def test_background_thread_works_when_priority_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's filter does, or a hook that forbids calls into C; a mock, since there is none here."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refused)
    monkeypatch.setattr(ctypes, "CDLL", refused)
    assert BackgroundThread("test", quiet=True).submit(lambda: 7).result() == 7
