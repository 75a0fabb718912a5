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

from ratchet_worker.aside import Aside
from ratchet_worker.turns import take_turns_late
from tests.unit.test_worker_saving import RANKS, Group

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
def test_whoever_awakes_goes_before_a_thread_of_a_save(usual: Attributes, quiet: bool) -> None:
    found = Aside("test", quiet=quiet).begin(attributes).result()
    assert found.slice == 20_000_000 > usual.slice
    assert (found.policy, found.nice) == (usual.policy, min(usual.nice + 5 * quiet, 19))
    assert attributes() == usual, "the thread that trains has another slice"


def test_and_before_the_saving_thread(usual: Attributes, tmp_path: Path) -> None:
    before = {thread.native_id for thread in threading.enumerate()}
    group = Group(tmp_path)
    group.step(1)
    group.drain()  # so that all of them have begun
    new = [thread for thread in threading.enumerate() if thread.native_id not in before]
    savers = [attributes(thread.native_id) for thread in new if thread.name == "ratchet-saver" and thread.native_id]
    assert savers == [usual._replace(slice=20_000_000)] * RANKS


_ROOT = Path(__file__).parents[2]
_TOLD = """
import os, sys
from ratchet_worker.turns import give_way, take_turns_late
from tests.unit.test_worker_turns import attributes
os.nice(17)
if sys.argv[1] == "idle":
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
before = attributes()
take_turns_late()
give_way()
print(*attributes(), before.slice)
"""


@pytest.mark.parametrize(("policy", "number"), [("other", 0), ("idle", 5)])
def test_what_a_user_has_said_of_the_processor_stays(usual: Attributes, policy: str, number: int) -> None:
    """A job under ``nice`` is not lifted, and a policy that has no slice is left alone."""
    told = subprocess.run(
        [sys.executable, "-c", _TOLD, policy], check=True, capture_output=True, text=True, timeout=120, cwd=_ROOT
    )
    *found, slice_before = map(int, told.stdout.split())
    after = Attributes(*found)
    assert (after.policy, after.nice) == (number, 19)
    assert after.slice == (20_000_000 if policy == "other" else slice_before)


def test_a_machine_whose_calls_are_not_known_is_left_alone(usual: Attributes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "sparc64")
    seen = []

    def late() -> None:
        take_turns_late()
        seen.append(attributes())

    thread = threading.Thread(target=late)
    thread.start()
    thread.join(20)
    assert seen == [usual]


def test_a_save_is_made_where_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's filter does, or a hook that forbids calls into C; a mock, since there is none here."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refused)
    monkeypatch.setattr(ctypes, "CDLL", refused)
    assert Aside("test", quiet=True).begin(lambda: 7).result() == 7
