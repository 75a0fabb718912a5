"""squeue's and sacct's answers -> ``JobRecord``. Pure.

Text is asked of Slurm before 23.11 with fields of a fixed width. From 23.11 on it is ``--json``, where several of a job's states
are a list and a number is ``{"set": true, "infinite": false, "number": 5}``; older JSON, with plain strings and numbers, is
understood too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from ratchet_service.launchers.slurm.states import JobRecord, exit_status

JSON_SINCE: Final = (23, 11)
"""Before, ``squeue --json`` gave all jobs of the cluster, whatever was asked for."""
_FIELDS: Final = ("JobID", "Name", "State", "Reason", "exit_code", "RestartCnt", "PreemptTime", "NodeList", "Comment")
_WIDTH: Final = 200
_NEVER: Final = frozenset({"", "N/A", "None", "Unknown"})
SQUEUE_FORMAT: Final = ",".join(f"{field}:{_WIDTH}" for field in _FIELDS)
SACCT_FORMAT: Final = "JobID,JobName,State,ExitCode"
_SACCT_STATE: Final = re.compile(r"([A-Z_]+)")


def version_of(text: str) -> tuple[int, int]:
    """``slurm-wlm 22.05.8`` -> (22, 5); (0, 0) where it cannot be told."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def squeue_text(output: str) -> list[JobRecord]:
    """The answer to ``squeue --noheader --Format=SQUEUE_FORMAT``."""
    return [_from_text(line) for line in output.splitlines() if line.strip()]


def squeue_json(output: str) -> list[JobRecord]:
    """The answer to ``squeue --json``, or ``sacct --json``. Raises ``ValueError``."""
    data = json.loads(output)
    try:
        return [_from_json(job) for job in data["jobs"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def sacct_text(output: str) -> list[JobRecord]:
    """The answer to ``sacct --noheader --parsable2 --format=SACCT_FORMAT``, with ``--completion`` too; steps are left out."""
    found: dict[int, JobRecord] = {}
    for line in output.splitlines():
        number, name, state, code = [*line.split("|"), "", "", ""][:4]
        word = _SACCT_STATE.match(state)  # "CANCELLED by 0"
        if number.isdigit() and word is not None:  # a requeued job has several lines, the newest last
            exit_code, _, signal = code.partition(":")
            found[int(number)] = JobRecord(
                int(number), name, word[1], exit_code=_whole(exit_code), signal=_whole(signal.partition(":")[0])
            )
    return list(found.values())


def _from_text(line: str) -> JobRecord:
    parts = [line[i * _WIDTH : (i + 1) * _WIDTH].strip() for i in range(len(_FIELDS))]
    number, name, state, reason, status, restarts, preempted, nodes, comment = parts
    exit_code, signal = exit_status(_whole(status))
    return JobRecord(
        id=_whole(number.partition("_")[0]),
        name=name,
        state=state,
        reason="" if reason == "None" else reason,
        comment="" if comment == "(null)" else comment,
        completing=state == "COMPLETING",
        exit_code=exit_code,
        signal=signal,
        restarts=_whole(restarts),
        preempted=preempted not in _NEVER,
        nodes=nodes,
    )


def _from_json(job: Mapping[str, Any]) -> JobRecord:
    told = job.get("state")
    states = told["current"] if isinstance(told, Mapping) else job["job_state"]
    reason = told.get("reason") if isinstance(told, Mapping) else job.get("state_reason")
    words = [states] if isinstance(states, str) else list(states)
    comment = job.get("comment") or ""
    exit_code, signal = _json_code(job.get("exit_code"))
    return JobRecord(
        id=int(job["job_id"]),
        name=str(job["name"]),
        state=words[0],
        reason="" if reason in (None, "None") else str(reason),
        comment=str(comment.get("job") or "") if isinstance(comment, Mapping) else str(comment),
        completing="COMPLETING" in words,
        exit_code=exit_code,
        signal=signal,
        restarts=_number(job.get("restart_cnt")),
        preempted=_number(job.get("preempt_time")) > 0,
        nodes=str(job.get("nodes") or ""),
    )


def _json_code(told: Any) -> tuple[int, int]:
    if isinstance(told, int):
        return exit_status(told)
    if not isinstance(told, Mapping):
        return 0, 0
    signal = told.get("signal") or {}
    return _number(told.get("return_code")), _number(signal.get("id", signal.get("signal_id")))


def _number(told: Any) -> int:
    """A number in the JSON of any version; 0 where it is not set or has no end."""
    if isinstance(told, Mapping):
        return int(told.get("number") or 0) if told.get("set") and not told.get("infinite") else 0
    return told if isinstance(told, int) else 0


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0
