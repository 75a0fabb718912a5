"""Two nodes: two real agents on this machine, which meet through a service; the ranks are stand-ins without torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.exit_codes import EXIT_PREEMPTED
from ratchet_contract.phases import Cause, Desired
from ratchet_contract.protocol.attempt_cause import combine_ends
from ratchet_contract.protocol.messages import AttemptResult, Control
from tests.support.attempts import Attempt, process_environment
from tests.support.server import wait_for

FOREVER: dict[str, Any] = {}
Make = Callable[..., Attempt]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Attempt] = []

    def _make(plans: list[dict[str, Any]], **spec: Any) -> Attempt:
        made.append(Attempt(tmp_path / str(len(made)), plans, nodes=2, spec=spec))
        return made[-1]

    yield _make
    for attempt in made:
        attempt.close()


def both(attempt: Attempt, deadline: float = 30) -> tuple[AttemptResult, AttemptResult]:
    wait_for(
        lambda: all(a.poll() is not None for a in attempt.agents), f"both agents to end\n{attempt.log()}", deadline
    )
    return attempt.result(0), attempt.result(1)


def started(attempt: Attempt) -> None:
    for node in (0, 1):
        attempt.start(node=node)
    for rank in range(attempt.launch.world_size):
        attempt.wait_step(rank)


def test_ranks_start_once_all_nodes_have_joined_and_agents_end_own_ranks(make: Make) -> None:
    """Node 1 comes first, then the service, then node 0. Node 1 is done first, too: its sweep leaves node 0's ranks alone."""
    attempt = make([FOREVER, FOREVER, {"steps": 3}, {"steps": 3, "child": "session"}])
    second = attempt.start(node=1)
    attempt.service.start()
    wait_for(lambda: attempt.service.addresses.keys() == {1}, "node 1 to tell where it is")
    assert attempt.rank_pids() == []
    attempt.start(node=0)
    attempt.wait_step(0)
    wait_for(lambda: second.poll() is not None, "node 1 to be done")
    assert attempt.result(1).cause is Cause.COMPLETED and len(attempt.rank_pids()) == 2
    env = process_environment(attempt.pid_of(1))
    assert (env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"], env["WORLD_SIZE"]) == ("1", "1", "0", "4")
    assert f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" == attempt.service.addresses[0]
    assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")  # the way to this service
    attempt.service.control = Control(desired=Desired.SUSPEND)
    first, other = both(attempt)
    assert (first.cause, first.node, [e.rank for e in first.ranks]) == (Cause.API_SUSPEND, 0, [0, 1])
    assert (other.node, [e.rank for e in other.ranks]) == (1, [2, 3])
    own = {"agent.lock", "agent.json", "control.json", "result.json"}
    assert {p.name for p in attempt.paths.node(1).root.iterdir()} == own
    shared = {"agent.log", "launch.json", "node-00001", "logs", "counters", "results"}
    assert {p.name for p in attempt.paths.root.iterdir()} == own | shared
    assert attempt.rank_pids() == []


@pytest.mark.parametrize("here", [0, 1])
def test_missing_node_is_named_after_startup_deadline(make: Make, here: int) -> None:
    attempt = make([FOREVER, FOREVER], policy={"startup_deadline": 1.5})
    attempt.service.start()
    attempt.start(node=here)
    wait_for(lambda: attempt.agents[0].poll() is not None, "the agent to give up")
    result = attempt.result(here)
    assert (result.cause, result.ranks) == (Cause.LAUNCHER_ERROR, []), result
    says = f"node {1 - here} of 2 did not join within startup_deadline (1.5 s); node {here} did. Check"
    assert result.message is not None and result.message.startswith(says)
    assert attempt.service.results[here] == result


def test_unreachable_service_or_unknown_interface_ends_the_attempt(make: Make) -> None:
    silent = make([FOREVER, FOREVER], policy={"startup_deadline": 1.0})
    silent.start(node=0)
    wait_for(lambda: silent.agents[0].poll() is not None, "the agent to give up")
    result = silent.result(0)
    assert result.cause is Cause.LAUNCHER_ERROR and "no service" in (result.message or ""), result
    world = {"nodes": 2, "ranks_per_node": 1, "device": "cpu", "interface": "nowhere0"}
    wrong = make([FOREVER, FOREVER], world=world)
    wrong.start(node=1)
    wait_for(lambda: wrong.agents[0].poll() is not None, "the agent to give up")
    result = wrong.result(1)
    assert result.cause is Cause.USER_ERROR
    assert "no interface nowhere0" in (result.message or "") and "lo (127.0.0.1" in (result.message or "")


def test_signal_to_a_waiting_node_also_ends_a_node_that_joins_later(make: Make) -> None:
    attempt = make([FOREVER, FOREVER])
    attempt.service.start()
    waiting = attempt.start(node=1)
    wait_for(lambda: 1 in attempt.service.addresses, "node 1 to wait")
    waiting.send_signal(signal.SIGUSR1)
    wait_for(lambda: waiting.poll() is not None, "node 1 to end", 5)
    attempt.start(node=0)
    late, told = both(attempt)
    assert (told.cause, told.ranks, waiting.returncode) == (Cause.TIME_LIMIT, [], EXIT_PREEMPTED)
    assert late.secondary and late.ranks == [] and "time-limit" in (late.message or "")
    end = combine_ends([late, told], 2)
    assert end is not None and (end.cause, end.node) == (Cause.TIME_LIMIT, 1)


def test_rank_killed_on_one_node_ends_the_other_and_is_the_cause(make: Make) -> None:
    attempt = make([FOREVER, FOREVER])
    attempt.service.start()
    started(attempt)
    at = time.time()
    os.kill(attempt.pid_of(1), signal.SIGKILL)
    first, second = both(attempt, 10)
    assert (second.cause, second.rank, second.secondary) == (Cause.RANK_KILLED, 1, False)
    assert second.began_at is not None and abs(second.began_at - at) < 2
    assert (
        first.secondary
        and first.ranks[0].exit_code is None
        and "node 1 has ended with rank-killed" in (first.message or "")
    )
    end = combine_ends([first, second], 2)
    assert end is not None and (end.cause, end.node, end.rank) == (Cause.RANK_KILLED, 1, 1)
    assert attempt.rank_pids() == []


def test_hang_cause_is_the_stopped_rank_not_the_waiting_rank(make: Make) -> None:
    """Rank 0 stands for one that waits in a collective: it stops counting a moment before the other is stopped."""
    attempt = make([{"at": 4, "do": "spin"}, {"at": 60, "do": "stop"}], policy={"step_deadline": 1.5})
    attempt.service.start()
    started(attempt)
    first, second = both(attempt)
    assert (second.cause, second.rank) == (Cause.HANG, 1) and "SIGSTOP" in (second.message or "")
    assert first.secondary, first
    end = combine_ends([first, second], 2)
    assert end is not None and (end.cause, end.rank) == (Cause.HANG, 1)
    for rank, why in ((0, "a rank of another node hangs"), (1, "hang")):
        heading, _, told = (
            attempt.paths.log(rank).read_text().partition(f"ratchet: {why}; rank {rank} writes the stacks")
        )
        assert "in misbehave" in told, (rank, heading, told)


def test_time_limit_is_the_cause_of_a_stop_by_sigusr1(make: Make) -> None:
    attempt = make([FOREVER, FOREVER])
    attempt.service.start()
    started(attempt)
    for agent in attempt.agents:
        agent.send_signal(signal.SIGUSR1)
    files = [attempt.paths.node(node).control_file for node in (0, 1)]
    wait_for(
        lambda: all(b"time-limit" in file.read_bytes() for file in files), "both agents to receive the first signal"
    )
    for agent in attempt.agents:
        agent.terminate()  # the engine's next word changes nothing
    assert {r.cause for r in both(attempt)} == {Cause.TIME_LIMIT}
    assert [a.returncode for a in attempt.agents] == [EXIT_PREEMPTED] * 2
