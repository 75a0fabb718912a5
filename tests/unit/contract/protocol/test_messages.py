"""Messages of another version of the same protocol: unknown keys are ignored, but not those of a specification."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from ratchet_contract.phases import AttemptPhase
from ratchet_contract.protocol.messages import AgentReport, LaunchFile
from tests.support.kube_jobs import launch_of, spec_of


def test_report_with_unknown_keys_is_accepted() -> None:
    base = {"step": 0, "attempt": 0, "digest": None, "weather": "fine"}
    message = {"kind": "training", "rank": 0, "at": "2026-01-01T00:00:00Z", "base": base, "weather": "fine"}
    batch = {"rank": 0, "from_seq": 1, "messages": [message], "weather": "fine"}
    report = AgentReport.model_validate(
        {"job_id": "job-1", "attempt": 1, "phase": "RUNNING", "batches": [batch], "weather": "fine"}
    )
    assert report.phase is AttemptPhase.RUNNING and report.batches[0].messages[0].kind == "training"


def test_a_report_with_an_unknown_kind_of_message_is_refused() -> None:
    batch = {"rank": 0, "from_seq": 1, "messages": [{"kind": "weather", "rank": 0}]}
    with pytest.raises(ValidationError, match="weather"):
        AgentReport.model_validate({"job_id": "job-1", "attempt": 1, "phase": "RUNNING", "batches": [batch]})


def test_launch_file_allows_unknown_keys_except_in_spec() -> None:
    launch = launch_of(spec_of())
    data = launch.model_dump(mode="json")
    data["resolved"]["weather"] = data["weather"] = "fine"
    assert LaunchFile.model_validate(data) == launch
    data["spec"]["weather"] = "fine"
    with pytest.raises(ValidationError, match=r"spec\.weather"):
        LaunchFile.model_validate(data)
