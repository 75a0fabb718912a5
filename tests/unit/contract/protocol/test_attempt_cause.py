"""Several nodes' results and the engine's word become one cause: what made the others comes first."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_contract.protocol.attempt_cause import EndSeen, combine_ends
from ratchet_contract.protocol.messages import AttemptResult

C = Cause


def result(node: int, cause: Cause, began: float | None = 100.0, **more: Any) -> AttemptResult:
    facts: dict[str, Any] = {
        "job_id": "job-1",
        "attempt": 1,
        "last_step": 3,
        "started_at": "",
        "ended_at": "",
        "ranks": [],
    }
    facts |= {"node": node, "rank": node, "cause": cause, "message": f"{cause} there", "began_at": began}
    return AttemptResult.model_validate(facts | more)


LOST = EndSeen(C.NODE_LOST, 1, message="node b is down")
TAKEN = EndSeen(C.HIGHER_PRIORITY, None, message="job 7 took the place")


@pytest.mark.parametrize(
    ("results", "engine", "cause", "node"),
    [
        ([result(0, C.COMPLETED), result(1, C.COMPLETED)], [], C.COMPLETED, 0),
        # a killed rank breaks the others' connections, also where they notice first
        ([result(0, C.EXCEPTION, 99.0), result(1, C.RANK_KILLED, 101.0)], [], C.RANK_KILLED, 1),
        ([result(0, C.HANG, 99.0), result(1, C.OOM, 101.0)], [], C.OOM, 1),
        # but for one that NCCL aborted when the connection broke
        ([result(0, C.EXCEPTION, 99.0), result(1, C.RANK_KILLED, 101.0, exit_code=-6)], [], C.EXCEPTION, 0),
        # of two exceptions the earlier made the later
        ([result(0, C.EXCEPTION, 105.0), result(1, C.EXCEPTION, 101.0)], [], C.EXCEPTION, 1),
        # at the same time, as clocks go: by precedence
        ([result(0, C.EXCEPTION, 100.0), result(1, C.CHECKPOINT_ERROR, 100.3)], [], C.CHECKPOINT_ERROR, 1),
        # who only followed has no say
        ([result(0, C.HANG, 90.0, secondary=True), result(1, C.EXCEPTION, 101.0)], [], C.EXCEPTION, 1),
        ([result(0, C.UNKNOWN, secondary=True), result(1, C.UNKNOWN, secondary=True)], [], C.UNKNOWN, 0),
        # a failure on one node is no clean stop, whatever the other says
        ([result(0, C.SIGTERM), result(1, C.EXCEPTION)], [], C.EXCEPTION, 1),
        ([result(0, C.API_SUSPEND), result(1, C.SIGTERM)], [], C.API_SUSPEND, 0),
        # a node that fell silent: the engine knows why, or nobody does; its peers' broken connections do not count
        ([result(0, C.EXCEPTION, 99.0)], [LOST], C.NODE_LOST, 1),
        ([result(0, C.EXCEPTION, 99.0)], [], C.UNKNOWN, 1),
        ([], [LOST], C.NODE_LOST, 1),
        # the engine's word on a node that has its own result is no news
        ([result(0, C.EXCEPTION), result(1, C.OOM)], [LOST], C.OOM, 1),
        ([result(0, C.COMPLETED), result(1, C.COMPLETED)], [TAKEN], C.COMPLETED, 0),
        # whose agent lives on where the engine does not see it, and hears of nothing but the fence
        ([result(0, C.EXCEPTION), result(1, C.LEASE_LOST)], [LOST], C.NODE_LOST, 1),
        ([result(0, C.LEASE_LOST), result(1, C.LEASE_LOST)], [TAKEN], C.HIGHER_PRIORITY, None),
        ([result(0, C.EXCEPTION), result(1, C.LEASE_LOST)], [], C.LEASE_LOST, 1),
        # who sent the SIGTERM
        ([result(0, C.SIGTERM), result(1, C.SIGTERM)], [TAKEN], C.HIGHER_PRIORITY, 0),
        ([result(0, C.API_CANCEL), result(1, C.API_CANCEL)], [TAKEN], C.API_CANCEL, 0),
    ],
)
def test_combined_cause_is_chosen_from_node_results_and_engine(
    results: list[AttemptResult], engine: list[EndSeen], cause: Cause, node: int
) -> None:
    found = combine_ends(results, 2, engine)
    assert found is not None and (found.cause, found.node) == (cause, node)
    assert combine_ends(results[::-1], 2, engine) == found, "the order of arrival is nothing"


def test_combined_cause_without_results_is_none() -> None:
    assert combine_ends([], 2) is None


def test_combined_cause_is_node_lost_when_missing_node_was_killed() -> None:
    """What its peers tell of is their broken connection; what no broken connection makes stays the cause."""
    found = combine_ends([result(0, C.EXCEPTION)], 2, killed=True)
    assert found is not None and (found.cause, found.node) == (C.NODE_LOST, 1)
    assert "node 1 is cut off" in str(found.message) and "exception there" in str(found.message)
    found = combine_ends([result(0, C.RANK_KILLED, exit_code=-6)], 2, killed=True)
    assert found is not None and found.cause is C.NODE_LOST, "NCCL aborts a rank whose peer is gone"
    for cause in (C.USER_ERROR, C.OOM, C.RANK_KILLED, C.COMPLETED, C.SIGTERM):
        found = combine_ends([result(0, cause)], 2, killed=True)
        assert found is not None and (found.cause, found.node) == (cause, 0), cause
    found = combine_ends([result(0, C.EXCEPTION)], 2, [LOST._replace(cause=C.EVICTED)], killed=True)
    assert found is not None and found.cause is C.EVICTED


def test_of_several_silent_nodes_none_is_the_cause() -> None:
    for killed in (False, True):
        found = combine_ends([result(0, C.EXCEPTION)], 3, killed=killed)
        assert found is not None and found.node is None and "node 1, 2" in str(found.message)


def test_lease_lost_after_kill_is_not_the_combined_cause() -> None:
    found = combine_ends([result(0, C.EXCEPTION), result(1, C.LEASE_LOST)], 2, killed=True)
    assert found is not None and (found.cause, found.node) == (C.NODE_LOST, 1)
    found = combine_ends([result(0, C.LEASE_LOST)], 1, killed=True)
    assert found is not None and found.cause is C.LEASE_LOST, "nobody tells of anything else"


def test_combined_message_includes_engine_and_rank_causes() -> None:
    found = combine_ends([result(0, C.SIGTERM)], 1, [TAKEN])
    assert found is not None and found.message == "job 7 took the place; sigterm there"
