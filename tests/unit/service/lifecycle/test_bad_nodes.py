"""Which ends of attempts count as faults of a node, and which nodes the next attempt stays away from."""

from __future__ import annotations

import random
import signal
from datetime import UTC, datetime, timedelta

import pytest

from ratchet_contract.phases import Cause
from ratchet_service.lifecycle.bad_nodes import (
    FAULT_WINDOW,
    MAX_EXCLUDED,
    MIN_FAULTS,
    NodeFault,
    blamed_node,
    excluded_nodes,
    fault_kind,
)

NOW = datetime(2030, 1, 2, 12, tzinfo=UTC)
MANY = [f"n{i}" for i in range(20)]


def fault(host: str, hours: float, attempt: int = 1) -> NodeFault:
    return NodeFault(attempt, host, NOW - timedelta(hours=hours), "hang")


@pytest.mark.parametrize(
    ("cause", "code", "message", "kind"),
    [
        (Cause.NODE_LOST, None, None, "node-lost"),
        (Cause.UNKNOWN, None, "the agent was killed", "agent-lost"),
        (Cause.HANG, None, None, "hang"),
        (Cause.RANK_KILLED, -signal.SIGBUS, None, "sigbus"),
        (Cause.EXCEPTION, 1, "node 1: RuntimeError: CUDA error: uncorrectable ECC error encountered", "device-error"),
        (Cause.EXCEPTION, 1, "DistBackendError: NCCL error: unhandled system error", "device-error"),
        (Cause.EXCEPTION, 1, "RuntimeError: CUDA error: device-side assert triggered", None),
        (Cause.EXCEPTION, 1, "AcceleratorError: CUDA error: an illegal memory access was encountered", None),
        (Cause.EXCEPTION, 1, "OutOfMemoryError: CUDA out of memory", None),
        (Cause.EXCEPTION, 1, "AcceleratorError: CUDA error: unspecified launch failure", None),
        (
            Cause.EXCEPTION,
            1,
            "RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp",
            None,
        ),
        (
            Cause.EXCEPTION,
            1,
            "RuntimeError: Failed to initialize NVML: Driver/library version mismatch",
            "device-error",
        ),
        (Cause.EXCEPTION, 1, "ValueError: negative length", None),
        (Cause.RANK_KILLED, -signal.SIGKILL, None, None),
        (Cause.RANK_KILLED, -signal.SIGSEGV, None, None),
        *((cause, None, None, None) for cause in (Cause.OOM, Cause.EVICTED, Cause.SIGTERM, Cause.HIGHER_PRIORITY)),
        *(
            (cause, None, None, None)
            for cause in (Cause.USER_ERROR, Cause.TIME_LIMIT, Cause.API_CANCEL, Cause.LEASE_LOST)
        ),
    ],
)
def test_only_ends_that_may_be_the_hardwares_count(
    cause: Cause, code: int | None, message: str | None, kind: str | None
) -> None:
    assert fault_kind(cause, 0, code, message) == kind


def test_hang_counts_only_if_a_rank_is_named() -> None:
    assert fault_kind(Cause.HANG, None, None, None) is None


def test_hang_of_several_nodes_blames_none() -> None:
    """The ranks of the other nodes wait in a collective, and hang as well."""
    assert blamed_node(Cause.HANG, 1, 2) is None and blamed_node(Cause.HANG, None, 1) == 0
    assert blamed_node(Cause.NODE_LOST, 1, 2) == 1 and blamed_node(Cause.UNKNOWN, None, 2) is None


def test_one_fault_excludes_nothing_and_two_exclude_until_the_older_is_a_day_old() -> None:
    assert excluded_nodes([fault("n1", 1), fault("n2", 2)], MANY, 2, NOW) == []
    (one,) = excluded_nodes([fault("n1", 1, 7), fault("n1", 5, 6), fault("n2", 2)], MANY, 2, NOW)
    assert (one.host, [f.attempt for f in one.faults]) == ("n1", [6, 7])
    assert one.until == NOW - timedelta(hours=5) + FAULT_WINDOW
    assert "n1 is not used before 2030-01-03 07:00 UTC, after hang in attempt 6, hang in attempt 7" in one.sentence()
    assert excluded_nodes([fault("n1", 1), fault("n1", 5)], MANY, 2, one.until) == []


def test_as_many_known_machines_remain_as_the_job_needs() -> None:
    faults = [fault(host, 1 + n) for host in ("n1", "n2") for n in range(2 + (host == "n2"))]
    assert [one.host for one in excluded_nodes(faults, ["n1", "n2", "n3"], 1, NOW)] == ["n2", "n1"]
    assert [one.host for one in excluded_nodes(faults, ["n1", "n2", "n3"], 2, NOW)] == ["n2"]
    assert excluded_nodes(faults, ["n1", "n2", "n3"], 3, NOW) == []
    assert excluded_nodes(faults, [], 2, NOW) == []


def test_a_name_that_no_engine_has_is_never_sent_to_one() -> None:
    for name in ("n1,n2", "n1\n#SBATCH --uid=0", "n[1-9]", "-x", ""):
        assert excluded_nodes([fault(name, 1), fault(name, 2)], MANY, 1, NOW) == []


def test_drawn_histories_keep_the_bounds() -> None:
    draw = random.Random(5)
    seen = set()
    for _ in range(2000):
        hosts = MANY[: draw.randint(1, 6)]
        faults = [fault(draw.choice(hosts), draw.uniform(-1, 40), n) for n in range(draw.randint(0, 14))]
        nodes = draw.randint(1, 4)
        found = excluded_nodes(faults, hosts, nodes, NOW)
        assert found == excluded_nodes(draw.sample(faults, len(faults)), hosts, nodes, NOW)
        assert len(found) <= MAX_EXCLUDED and len(hosts) - len(found) >= min(nodes, len(hosts))
        for one in found:
            assert one.until > NOW and len(one.faults) >= MIN_FAULTS
            assert all(NOW - f.at < FAULT_WINDOW and f.host == one.host for f in one.faults)
        seen.add(len(found))
    assert seen == set(range(MAX_EXCLUDED + 1))
