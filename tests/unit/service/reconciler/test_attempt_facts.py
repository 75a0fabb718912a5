"""Facts about an attempt, from what its agents have left on the disk; user code may have written it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import AttemptResult
from ratchet_service.reconciler.attempt_facts import end_began_at, stop_received_at

GOOD = "2030-01-01T00:00:00+00:00"


def result(stop_at: str) -> AttemptResult:
    return AttemptResult(
        job_id="job-0123456789ab", attempt=1, cause=Cause.SIGTERM, last_step=0, started_at=GOOD, stop_at=stop_at,
        ended_at=GOOD, ranks=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    "text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-23:59", "2030-01-01T00:00:00", "soon", ""]
)
def test_stop_time_that_cannot_be_stored_is_not_known(text: str) -> None:
    assert stop_received_at([result(text)]) is None
    assert stop_received_at([result(text), result(GOOD)]) == datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("began", [253402300799.0, -62135596800.0, 1e300])
def test_begin_of_an_end_that_cannot_be_stored_is_not_known(began: float) -> None:
    assert end_began_at([result(GOOD).model_copy(update={"began_at": began})]) is None
