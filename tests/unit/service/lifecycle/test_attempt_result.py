"""What becomes of a job whose attempt has ended, from the attempt's row and the evidence of its end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet_contract.phases import Cause, Desired, JobPhase
from ratchet_service.launchers.base import AttemptState
from ratchet_service.lifecycle.attempt_result import EndSeen, Evidence, facts_of, verdict
from ratchet_service.lifecycle.decision import Limits

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("base_step", "delayed"), [(None, True), (0, False), (10, False)])
def test_attempt_refused_by_another_version_before_training_is_retried_with_backoff(
    base_step: int | None, delayed: bool
) -> None:
    job: Any = SimpleNamespace(
        id="j", phase=JobPhase.RUNNING, desired=Desired.RUN, desired_cause=None, attempt=1, preemptions=0, failures=0,
        attempts_without_progress=0, retries=0, not_before=None, running_seconds=0.0,
    )  # fmt: skip
    attempt: Any = SimpleNamespace(
        number=1, base_step=base_step, base_attempt=0, base_digest=None, last_step=base_step or 0, begun_at=NOW, created_at=NOW,
        resume_report=None,
    )  # fmt: skip
    evidence = Evidence(AttemptState(False, ()))
    ended = verdict(job, attempt, Limits(), EndSeen(Cause.UPGRADE), facts_of(attempt, None, 0), evidence, NOW)
    not_before = ended.decision.not_before
    assert (not_before is not None and not_before > NOW + timedelta(seconds=0.5)) is delayed
