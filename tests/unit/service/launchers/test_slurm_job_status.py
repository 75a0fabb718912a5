"""What Slurm says of a job -> what Ratchet concludes: states that a test cannot bring about, answers of other versions.

Text is as Slurm 22.05 printed it. The JSON of 23.02 and later is modelled by hand after Slurm's documentation: nothing here has
talked to such a version.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_service.launchers.slurm import job_status
from ratchet_service.launchers.slurm.job_status import JobRecord
from ratchet_service.launchers.slurm.squeue import parse_sacct_text, parse_squeue_json, parse_squeue_text, parse_version

NAME = "job-0123456789ab-a0001"


def set_(number: int | None) -> dict[str, Any]:
    return {"set": number is not None, "infinite": False, "number": number or 0}


def text_line(*fields: str) -> str:
    return "".join(field.ljust(200) for field in fields)


def job_2205(**more: Any) -> dict[str, Any]:
    """v0.0.37 and v0.0.38: plain words and numbers; the raw status of wait(2)."""
    return {
        "job_id": 17, "name": NAME, "job_state": "FAILED", "state_reason": "NonZeroExitCode", "comment": "ratchet-abc",
        "exit_code": 36608, "restart_cnt": 0, "preempt_time": 0, "nodes": "n[1-2]", **more,
    }  # fmt: skip


def job_2311(**more: Any) -> dict[str, Any]:
    """v0.0.39 (23.02) has one state as a word; from v0.0.40 (23.11) on they are a list; numbers may be unset or infinite."""
    return {
        "job_id": 17, "name": NAME, "job_state": ["FAILED"], "state_reason": "NonZeroExitCode", "comment": "ratchet-abc",
        "exit_code": {
            "status": ["ERROR"], "return_code": set_(143), "signal": {"id": set_(None), "name": ""},
        },
        "restart_cnt": 0, "preempt_time": set_(0), "nodes": "n[1-2]", **more,
    }  # fmt: skip


FAILED = JobRecord(17, NAME, "FAILED", reason="NonZeroExitCode", comment="ratchet-abc", exit_code=143, nodes="n[1-2]")


@pytest.mark.parametrize(
    "job",
    [
        job_2205(),
        job_2311(),
        job_2311(job_state="FAILED"),
        job_2311(exit_code={"status": "ERROR", "return_code": 143, "signal": {"signal_id": 0, "name": ""}}),
    ],
)
def test_squeue_json_of_all_versions_parses_to_same_record(job: dict[str, Any]) -> None:
    assert parse_squeue_json(json.dumps({"jobs": [job]})) == [FAILED]


def test_squeue_text_parses_to_same_record() -> None:
    line = text_line("17", NAME, "FAILED", "NonZeroExitCode", "36608", "0", "N/A", "n[1-2]", "ratchet-abc")
    assert parse_squeue_text(f"{line}\n\n") == [FAILED]
    line = text_line("18", NAME, "PENDING", "None", "0", "1", "2026-11-22T07:10:04", "", "(null)")
    assert parse_squeue_text(line) == [JobRecord(18, NAME, "PENDING", restarts=1, preempted=True)]


def test_squeue_json_with_several_states_and_unset_numbers_is_parsed() -> None:
    (job,) = parse_squeue_json(
        json.dumps(
            {"jobs": [job_2311(job_state=["NODE_FAIL", "COMPLETING"], preempt_time=set_(1_790_000_000), restart_cnt=2)]}
        )
    )
    assert (job.state, job.completing, job.has_ended, job.preempted, job.restarts) == (
        "NODE_FAIL",
        True,
        False,
        True,
        2,
    )
    endless = {"set": True, "infinite": True, "number": 0}
    (job,) = parse_squeue_json(json.dumps({"jobs": [job_2311(preempt_time=endless, comment=None, nodes=None)]}))
    assert (job.preempted, job.comment, job.nodes) == (False, "", "")


def test_accounting_output_in_json_and_text_is_parsed() -> None:
    modern = {"job_id": 17, "name": NAME, "state": {"current": ["TIMEOUT"], "reason": "TimeLimit"}, "nodes": "n1"}
    modern |= {"comment": {"job": "ratchet-abc", "administrator": ""}, "exit_code": job_2311()["exit_code"]}
    (job,) = parse_squeue_json(json.dumps({"jobs": [modern]}))
    assert (job.state, job.reason, job.comment, job.exit_code) == ("TIMEOUT", "TimeLimit", "ratchet-abc", 143)
    said = f"17|{NAME}|CANCELLED by 1000|0:15\n17.batch|batch|CANCELLED|0:15\n18|{NAME}|PENDING|0:0\n18|{NAME}|FAILED|2:0\n"
    assert [(job.id, job.state, job.exit_code, job.signal) for job in parse_sacct_text(said)] == [
        (17, "CANCELLED", 0, 15),
        (18, "FAILED", 2, 0),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        "", "{}", '{"jobs": [{"name": "x"}]}', '{"jobs": null}', "Slurm is down",
        json.dumps({"jobs": [job_2311(job_state=[])]}), json.dumps({"jobs": [job_2311(state={"current": []})]}),
    ],
)  # fmt: skip
def test_malformed_squeue_json_raises(answer: str) -> None:
    with pytest.raises(ValueError):
        parse_squeue_json(answer)


@pytest.mark.parametrize(
    ("text", "version"), [("slurm-wlm 22.05.8", (22, 5)), ("slurm 24.11.0-0rc1", (24, 11)), ("?", (0, 0))]
)
def test_slurm_version_is_parsed(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("state", "more", "cause"),
    [
        ("PREEMPTED", {}, Cause.HIGHER_PRIORITY),
        ("TIMEOUT", {}, Cause.TIME_LIMIT),
        ("DEADLINE", {}, Cause.TIME_LIMIT),
        ("NODE_FAIL", {}, Cause.NODE_LOST),
        ("BOOT_FAIL", {}, Cause.NODE_LOST),
        ("OUT_OF_MEMORY", {}, Cause.OOM),
        ("CANCELLED", {}, Cause.SIGTERM),
        ("CANCELLED", {"preempted": True}, Cause.HIGHER_PRIORITY),
        ("COMPLETED", {"preempted": True}, Cause.HIGHER_PRIORITY),
        ("REVOKED", {}, Cause.LAUNCHER_ERROR),
        ("FAILED", {"exit_code": 143}, Cause.SIGTERM),
        ("FAILED", {"exit_code": 78}, Cause.USER_ERROR),
        ("FAILED", {"exit_code": 127}, Cause.LAUNCHER_ERROR),
        ("FAILED", {"exit_code": 137}, Cause.UNKNOWN),
        ("FAILED", {"signal": 9}, Cause.UNKNOWN),
        ("FAILED", {"exit_code": 75, "restarts": 1}, Cause.SIGTERM),
        ("COMPLETED", {}, None),
        ("RUNNING", {}, None),
    ],
)
def test_slurm_end_state_maps_to_cause(state: str, more: dict[str, Any], cause: Cause | None) -> None:
    end = job_status.engine_end(JobRecord(17, NAME, state, **more), started=True, has_results=False)
    assert (end.cause if end is not None else None) is cause
    assert end is None or "17" in end.message


def test_exit_code_gives_cause_only_if_agent_began_without_result() -> None:
    job = JobRecord(17, NAME, "FAILED", exit_code=1)
    seen = job_status.engine_end(job, started=True, has_results=False)
    unseen = job_status.engine_end(job, started=False, has_results=False)
    assert seen is not None and unseen is not None
    assert (seen.cause, unseen.cause) == (Cause.EXCEPTION, Cause.LAUNCHER_ERROR)
    assert job_status.engine_end(job, started=True, has_results=True) is None


@pytest.mark.parametrize("state", ["COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "A_STATE_TO_COME"])
def test_unknown_or_transitional_slurm_state_is_alive(state: str) -> None:
    job = JobRecord(17, NAME, state)
    assert (
        not job.has_ended
        and job_status.waiting_reason(job) is None
        and job_status.engine_end(job, started=True, has_results=False) is None
    )


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Priority", "waits: Priority"),
        ("Resources", "waits: Resources"),
        ("ReqNodeNotAvail, UnavailableNodes:n2", "UnavailableNodes:n2"),
        ("AssocGrpCpuLimit", "AssocGrpCpuLimit"),
        ("PartitionNodeLimit", "PartitionNodeLimit"),  # or that nodes are down: squeue(1)
        ("QOSMaxJobsPerUserLimit", "QOSMaxJobsPerUserLimit"),
        ("JobHeldAdmin", "held by an administrator"),
        ("", "no reason given yet"),
    ],
)
def test_pending_reason_that_may_resolve_is_waited_for(reason: str, said: str) -> None:
    job = JobRecord(17, NAME, "PENDING", reason=reason)
    assert said in str(job_status.waiting_reason(job)) and job_status.unstartable_reason(job) is None


@pytest.mark.parametrize(
    "reason",
    [
        "PartitionTimeLimit", "PartitionConfig", "BadConstraints", "InvalidAccount", "InvalidQOS",
        "DependencyNeverSatisfied", "QOSMaxCpuPerJobLimit", "AssocMaxNodePerJobLimit", "QOSMaxWallDurationPerJobLimit",
        "launch failed requeued held",
    ],
)  # fmt: skip
def test_pending_reason_that_cannot_resolve_ends_attempt(reason: str) -> None:
    job = JobRecord(17, NAME, "PENDING", reason=reason)
    end = job_status.engine_end(job, started=False, has_results=False)
    assert job_status.waiting_reason(job) is None
    assert end is not None and end.cause is Cause.LAUNCHER_ERROR and reason in end.message


def test_configuring_nodes_are_waited_for() -> None:
    assert "prepares" in str(job_status.waiting_reason(JobRecord(17, NAME, "CONFIGURING")))


def test_srun_log_names_ended_tasks() -> None:
    log = (
        "srun: cluster configuration lacks support for cpu binding\n"
        "srun: error: n2: task 1: Exited with exit code 143\n"
        "srun: error: n4: tasks 3-5,8: Killed\n"
        "3: srun: a line that a user's setup printed\n"
    )
    assert job_status.ended_tasks(log, 9) == {1: "Exited with exit code 143", **dict.fromkeys((3, 4, 5, 8), "Killed")}


def test_srun_log_written_by_the_user_names_no_impossible_tasks() -> None:
    lines = ("tasks 2-9999999999: x", "task 9999999999: x", "tasks 1,,-: x", "tasks 3-: x", "tasks 9-1: x")
    log = "".join(f"srun: error: n1: {line}\n" for line in lines)
    assert job_status.ended_tasks(log, 4) == {2: "x", 3: "x"}
