"""How attempts end: the real agent, real processes, real signals; the ranks are stand-ins without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.exit_codes import EXIT_COMPLETED, EXIT_HANG, EXIT_PREEMPTED
from ratchet_contract.phases import Cause, Desired
from ratchet_contract.processes import procfs
from ratchet_contract.protocol.messages import Control
from tests.support.attempts import AGENT, Attempt
from tests.support.server import wait_for

Make = Callable[..., Attempt]
FOREVER: dict[str, Any] = {}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Attempt] = []

    def _make(plans: list[dict[str, Any]], **more: Any) -> Attempt:
        made.append(Attempt(tmp_path / str(len(made)), plans, **more))
        return made[-1]

    yield _make
    for attempt in made:
        attempt.close()


def policy(**values: Any) -> dict[str, Any]:
    return {"policy": values}


def test_completed_attempt_leaves_result_and_exit_code_and_no_process(make: Make) -> None:
    attempt = make([{"steps": 5, "child": "session"}, {"steps": 5, "child": "bare"}])
    attempt.service.start()
    agent = attempt.start()
    result = attempt.wait()
    assert (result.cause, result.last_step, agent.returncode) == (Cause.COMPLETED, 5, EXIT_COMPLETED), attempt.log()
    assert [end.exit_code for end in result.ranks] == [0, 0]
    assert attempt.rank_pids() == []  # grandchildren of both kinds: own session, and stripped of all variables


FAILING_CLEAN_UP = """
import runpy, shutil, sys
def fails(*_, **__):
    raise OSError(5, "Input/output error")
shutil.rmtree = fails
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_failing_clean_up_does_not_lose_the_result(make: Make) -> None:
    attempt = make([{"steps": 5}])
    command = [sys.executable, "-P", "-c", FAILING_CLEAN_UP, str(AGENT), str(attempt.paths.launch_file), "{}", "0"]
    with attempt.paths.agent_log.open("ab") as log:
        attempt.agents.append(agent := subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
    assert agent.wait(60) == EXIT_COMPLETED, attempt.log()
    assert attempt.wait().cause is Cause.COMPLETED and "Input/output error" in attempt.log()


def test_sigkill_of_a_rank_ends_the_attempt_within_two_seconds(make: Make) -> None:
    attempt = make([FOREVER, FOREVER])
    attempt.start(failure_grace=60.0)  # after a kill, nothing that a survivor may write is waited for
    attempt.wait_step(0)
    attempt.wait_step(1)
    os.kill(attempt.pid_of(1), signal.SIGKILL)
    wait_for(attempt.paths.result_file.exists, "the result", 2)
    result = attempt.wait()
    assert (result.cause, result.rank, result.exit_code) == (Cause.RANK_KILLED, 1, -signal.SIGKILL)
    assert result.ranks[0].exit_code is None  # killed by the teardown, not by itself
    assert result.message is not None and "rank 1 was killed by SIGKILL" in result.message
    assert attempt.rank_pids() == []


def test_first_failure_is_the_cause_not_a_survivors_broken_connection(make: Make, tmp_path: Path) -> None:
    """Rank 1 stands for a survivor: it fails by itself, with a result, as soon as rank 0 is gone."""
    gone = tmp_path / "gone"
    attempt = make([FOREVER, {"at": 1, "do": "raise", "after": str(gone)}])
    agent = attempt.start()
    attempt.wait_step(0)
    attempt.wait_step(1)
    agent.send_signal(signal.SIGSTOP)  # it sees both ends at once
    os.kill(attempt.pid_of(0), signal.SIGKILL)
    gone.touch()
    wait_for(attempt.paths.rank_result(1).exists, "the survivor's result", 10)
    agent.send_signal(signal.SIGCONT)
    result = attempt.wait()
    assert (result.cause, result.rank) == (Cause.RANK_KILLED, 0)
    survivor = result.ranks[1].result
    assert survivor is not None and survivor.cause is Cause.EXCEPTION  # it is told, but is not the cause


@pytest.mark.parametrize(
    ("do", "cause", "says"),
    [
        ("raise", Cause.EXCEPTION, "ValueError: wrong"),
        ("oom-result", Cause.OOM, "out of memory"),
        ("exit0", Cause.EXCEPTION, "exit code 0 and no result"),
    ],
)
def test_failing_rank_names_cause_and_rank(make: Make, do: str, cause: Cause, says: str) -> None:
    attempt = make([FOREVER, {"at": 3, "do": do}])
    attempt.start()
    result = attempt.wait()
    assert (result.cause, result.rank) == (cause, 1)
    assert result.message is not None and says in result.message


def test_stopped_rank_hangs_by_step_deadline_and_is_named(make: Make) -> None:
    """Rank 0 waits for the stopped rank, as in a collective: it stands still as well."""
    attempt = make([{"at": 4, "do": "spin"}, {"at": 4, "do": "stop"}], spec=policy(step_deadline=1.0))
    agent = attempt.start()
    result = attempt.wait()
    assert (result.cause, result.rank, agent.returncode) == (Cause.HANG, 1, EXIT_HANG)
    assert result.message is not None and "SIGSTOP" in result.message and "rank 1" in result.message
    assert "in misbehave" in attempt.paths.log(0).read_text()  # the stacks of a rank that still could tell
    assert attempt.rank_pids() == []


def test_rank_at_the_lowest_step_is_named_as_hung(make: Make) -> None:
    attempt = make([{"at": 9, "do": "spin"}, {"at": 8, "do": "spin"}], spec=policy(step_deadline=1.0))
    attempt.start()
    result = attempt.wait()
    assert (result.cause, result.rank) == (Cause.HANG, 1)
    assert result.message is not None and "in step 8" in result.message and "step_deadline" in result.message


def test_rank_without_heartbeat_is_ended_by_startup_deadline(make: Make) -> None:
    attempt = make([FOREVER, {"startup": False}], spec=policy(startup_deadline=1.5))
    attempt.start()
    result = attempt.wait()
    assert (result.cause, result.rank) == (Cause.HANG, 1)
    assert result.message is not None and "startup_deadline" in result.message


def test_sigterm_stops_all_ranks_with_cause_sigterm(make: Make) -> None:
    attempt = make([FOREVER, FOREVER])
    agent = attempt.start()
    attempt.wait_step(0)
    agent.terminate()
    agent.terminate()  # a second one changes nothing
    result = attempt.wait()
    assert (result.cause, agent.returncode) == (Cause.SIGTERM, EXIT_PREEMPTED)
    assert [end.exit_code for end in result.ranks] == [EXIT_PREEMPTED, EXIT_PREEMPTED]


def test_rank_ended_by_sigterm_without_result_stops_the_other_ranks(make: Make) -> None:
    attempt = make([FOREVER, FOREVER])  # stand-ins have no handler, like a rank that has only just been started
    agent = attempt.start()
    attempt.wait_step(0)
    attempt.wait_step(1)
    os.kill(attempt.pid_of(1), signal.SIGTERM)
    result = attempt.wait()
    assert (result.cause, result.rank, agent.returncode) == (Cause.SIGTERM, 1, EXIT_PREEMPTED)


@pytest.mark.parametrize(("spin", "cause"), [(False, Cause.SIGTERM), (True, Cause.HANG)])
def test_ranks_that_ignore_a_stop_are_killed_after_stop_grace(make: Make, spin: bool, cause: Cause) -> None:
    """Ranks that go on training are preempted all the same; ranks that stand still hang."""
    plan = {"at": 5, "do": "spin"} if spin else {"obey": False}
    attempt = make([plan, plan], spec=policy(stop_grace=1.0))
    agent = attempt.start()
    attempt.wait_step(0, 4)
    attempt.wait_step(1, 4)
    agent.terminate()
    result = attempt.wait()
    assert result.cause is cause
    assert result.message is not None and "no agreed stop" in result.message
    assert attempt.rank_pids() == []


def test_service_request_overrides_an_earlier_signal(make: Make) -> None:
    attempt = make([{"obey": False}], spec=policy(stop_grace=3.0))
    attempt.service.start()
    agent = attempt.start()
    attempt.wait_step(0)
    agent.terminate()
    attempt.wait_log("preempt (sigterm)")
    attempt.service.control = Control(desired=Desired.CANCEL, cause=Cause.API_CANCEL, checkpoint_request=2)
    attempt.wait_log("cancel (api-cancel), checkpoint request 2")
    assert Control.model_validate_json(attempt.paths.control_file.read_bytes()) == attempt.service.control
    assert attempt.wait().cause is Cause.API_CANCEL


def test_stop_that_cannot_be_written_for_the_ranks_is_the_cause_all_the_same(make: Make) -> None:
    """A directory in place of ``control.json`` stands for a full disk: the ranks never learn of the stop."""
    attempt = make([FOREVER], spec=policy(stop_grace=1.0))
    agent = attempt.start()
    attempt.wait_step(0)
    attempt.paths.control_file.unlink()
    attempt.paths.control_file.mkdir()
    agent.terminate()
    result = attempt.wait()
    assert "control.json cannot be written" in attempt.log()
    assert (result.cause, agent.returncode) == (Cause.SIGTERM, EXIT_PREEMPTED), result
    assert result.message is not None and "no agreed stop" in result.message


def test_stop_that_cannot_be_written_prevents_a_start(make: Make) -> None:
    attempt = make([FOREVER], spec=policy(stop_grace=1.0), desired=Desired.SUSPEND)
    attempt.paths.control_file.mkdir()
    attempt.start()
    result = attempt.wait()
    assert "control.json cannot be written" in attempt.log()
    assert (result.cause, result.ranks) == (Cause.API_SUSPEND, []), result
    assert not attempt.paths.log(0).exists()


def test_sigkill_of_the_agent_leaves_no_rank_alive(make: Make) -> None:
    attempt = make([FOREVER, FOREVER])
    agent = attempt.start()
    attempt.wait_step(0)
    attempt.wait_step(1)
    assert len(attempt.rank_pids()) == 2
    agent.kill()
    wait_for(lambda: not attempt.rank_pids(), "the ranks to die with their agent", 5)
    assert not attempt.paths.result_file.exists()


def test_rank_that_lingers_after_writing_a_result_is_killed(make: Make) -> None:
    attempt = make([{"steps": 3}, {"at": 3, "do": "finish-but-stay"}])
    attempt.start(linger=0.5)
    result = attempt.wait()
    assert (result.cause, result.ranks[1].exit_code) == (Cause.COMPLETED, None)


def test_group_signal_to_the_agent_does_not_reach_the_ranks(make: Make) -> None:
    attempt = make([{"steps": 3, "at": 2, "do": "spin", "obey": False}], spec=policy(stop_grace=60))
    agent = attempt.start()
    attempt.wait_step(0, 1)
    rank = attempt.pid_of(0)
    os.killpg(agent.pid, signal.SIGINT)
    attempt.wait_log("preempt (sigterm)")
    assert procfs.start_time(rank) is not None
    os.killpg(rank, signal.SIGKILL)
    assert attempt.wait().cause is Cause.RANK_KILLED
