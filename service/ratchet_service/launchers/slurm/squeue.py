"""Queries squeue and sacct, and parses their answers into ``JobRecord``. Later versions of squeue are queried for JSON. Old
versions of squeue, and sacct, are queried for text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from ratchet_service.launchers.base import EngineUnreachable
from ratchet_service.launchers.slurm.commands import CannotRun, Commands, Refused, own_user
from ratchet_service.launchers.slurm.job_status import JobRecord, decode_wait_status

JSON_SINCE: Final = (23, 11)
"""Earlier versions of ``squeue --json`` return all jobs of the cluster, whatever is requested."""
_FIELDS: Final = ("JobID", "Name", "State", "Reason", "exit_code", "RestartCnt", "PreemptTime", "NodeList", "Comment")
_WIDTH: Final = 200
_NEVER: Final = frozenset({"", "N/A", "None", "Unknown"})
SQUEUE_FORMAT: Final = ",".join(f"{field}:{_WIDTH}" for field in _FIELDS)
SACCT_FORMAT: Final = "JobID,JobName,State,ExitCode"
_SACCT_STATE: Final = re.compile(r"([A-Z_]+)")


def parse_version(text: str) -> tuple[int, int]:
    """Return the first two numbers of Slurm's version: ``slurm-wlm 22.05.8`` -> (22, 5); (0, 0) if there are none."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def parse_squeue_text(output: str) -> list[JobRecord]:
    """Parse the output of ``squeue --noheader --Format=SQUEUE_FORMAT``: one job per line."""
    return [_record_from_text(line) for line in output.splitlines() if line.strip()]


def parse_squeue_json(output: str) -> list[JobRecord]:
    """Parse the output of ``squeue --json`` or ``sacct --json``. Raises ``ValueError`` if it is not such a document."""
    data = json.loads(output)
    try:
        return [_record_from_json(job) for job in data["jobs"]]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def parse_sacct_text(output: str) -> list[JobRecord]:
    """Parse the output of ``sacct --noheader --parsable2 --format=SACCT_FORMAT``. A job with several lines gives one record, from
    its last line. Lines of job steps are left out."""
    found: dict[int, JobRecord] = {}
    for line in output.splitlines():
        number, name, state, code = [*line.split("|"), "", "", ""][:4]
        word = _SACCT_STATE.match(state)  # "CANCELLED by 0"
        if number.isdigit() and word is not None:  # a requeued job has several lines, the newest last
            exit_code, _, signal = code.partition(":")
            found[int(number)] = JobRecord(
                int(number),
                name,
                word[1],
                exit_code=_int_or_zero(exit_code),
                signal=_int_or_zero(signal.partition(":")[0]),
            )
    return list(found.values())


def _record_from_text(line: str) -> JobRecord:
    """Parse one line of ``squeue --Format``."""
    parts = [line[i * _WIDTH : (i + 1) * _WIDTH].strip() for i in range(len(_FIELDS))]
    number, name, state, reason, status, restarts, preempted, nodes, comment = parts
    exit_code, signal = decode_wait_status(_int_or_zero(status))
    return JobRecord(
        id=_int_or_zero(number.partition("_")[0]),
        name=name,
        state=state,
        reason="" if reason == "None" else reason,
        comment="" if comment == "(null)" else comment,
        completing=state == "COMPLETING",
        exit_code=exit_code,
        signal=signal,
        restarts=_int_or_zero(restarts),
        preempted=preempted not in _NEVER,
        nodes=nodes,
    )


def _record_from_json(job: Mapping[str, Any]) -> JobRecord:
    """Convert one job of the JSON. Raises an error, such as ``KeyError``, if it does not have the expected form."""
    state = job.get("state")
    states = state["current"] if isinstance(state, Mapping) else job["job_state"]
    reason = state.get("reason") if isinstance(state, Mapping) else job.get("state_reason")
    words = [states] if isinstance(states, str) else list(states)
    comment = job.get("comment") or ""
    exit_code, signal = _json_exit_status(job.get("exit_code"))
    return JobRecord(
        id=int(job["job_id"]),
        name=str(job["name"]),
        state=words[0],
        reason="" if reason in (None, "None") else str(reason),
        comment=str(comment.get("job") or "") if isinstance(comment, Mapping) else str(comment),
        completing="COMPLETING" in words,
        exit_code=exit_code,
        signal=signal,
        restarts=_json_number(job.get("restart_cnt")),
        preempted=_json_number(job.get("preempt_time")) > 0,
        nodes=str(job.get("nodes") or ""),
    )


def _json_exit_status(value: Any) -> tuple[int, int]:
    """Return exit code and signal of a job in the JSON of any version; zeros if there are none."""
    if isinstance(value, int):
        return decode_wait_status(value)
    if not isinstance(value, Mapping):
        return 0, 0
    signal = value.get("signal") or {}
    return _json_number(value.get("return_code")), _json_number(signal.get("id", signal.get("signal_id")))


def _json_number(value: Any) -> int:
    """Return a number in the JSON of any version; 0 if it is not set or infinite."""
    if isinstance(value, Mapping):
        return int(value.get("number") or 0) if value.get("set") and not value.get("infinite") else 0
    return value if isinstance(value, int) else 0


def _int_or_zero(text: str) -> int:
    """Return the number; 0 for a text that is not digits."""
    return int(text) if text.isdigit() else 0


_UNREACHABLE_SECONDS = 10.0
_HISTORY = "now-30days"


class Queue:
    """The jobs of the service's user in Slurm. ``period``: seconds for which an answer is reused. ``clock``: monotonic."""

    def __init__(self, commands: Commands, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._commands = commands
        self._period = period
        self._clock = clock
        self._version: tuple[int, int] | None = None
        self._jobs: dict[str, list[JobRecord]] = {}
        self._fetched_at: float | None = None
        self._unreachable_until: tuple[float, EngineUnreachable] | None = None
        self._accounting_unreachable_until: tuple[float, EngineUnreachable] | None = None

    def jobs(self, *, since: float | None = None) -> dict[str, list[JobRecord]]:
        """Return job name -> jobs of this user, sorted by id. An earlier answer is reused if it is younger than the ``period`` of
        this object. ``since``: an answer that was requested before this time is not reused; None: no such limit. After a failed
        query, no other query is made for at least 10 s. Raises ``EngineUnreachable`` if the query fails, or is not made because
        an earlier one failed."""
        now = self._clock()
        if (
            self._fetched_at is not None
            and now - self._fetched_at < self._period
            and (since is None or self._fetched_at > since)
        ):
            return self._jobs
        if self._unreachable_until is not None and now < self._unreachable_until[0]:
            raise self._unreachable_until[1]
        try:
            self._jobs, self._fetched_at, self._unreachable_until = self._fetch(), now, None
        except EngineUnreachable as error:
            self._unreachable_until = (self._clock() + max(self._period, _UNREACHABLE_SECONDS), error)
            raise
        return self._jobs

    def all_known_ended(self, name: str) -> bool:
        """True if no job of that name was live in the last answer. Queries nothing."""
        return all(job.has_ended for job in self._jobs.get(name, []))

    def accounting_records(self, name: str) -> list[JobRecord]:
        """Return the records of jobs of that name that Slurm has kept, for the last 30 days; empty if it keeps none. Raises
        ``EngineUnreachable``."""
        if self._accounting_unreachable_until is not None and self._clock() < self._accounting_unreachable_until[0]:
            raise self._accounting_unreachable_until[1]
        unreachable: EngineUnreachable | None = None
        arguments = [
            "--noheader",
            "--parsable2",
            f"--format={SACCT_FORMAT}",
            f"--name={name}",
            f"--starttime={_HISTORY}",
        ]
        for more in (["--allocations"], ["--completion"]):
            try:
                listed = parse_sacct_text(self._commands.run("sacct", *arguments, *more))
            except (Refused, CannotRun):  # the cluster does not keep it
                continue
            except EngineUnreachable as error:
                unreachable = error
                continue
            found = [job for job in listed if job.name == name]  # the completion log is returned unfiltered
            if found:
                return found
        if unreachable is not None:
            until = self._clock() + max(self._period, _UNREACHABLE_SECONDS)
            self._accounting_unreachable_until = (until, unreachable)
            raise unreachable
        return []

    def _fetch(self) -> dict[str, list[JobRecord]]:
        """Query squeue and return name -> jobs. Raises ``EngineUnreachable`` if that fails."""
        try:
            if self._version is None:
                self._version = parse_version(self._commands.run("sinfo", "--version"))
            as_json = self._version >= JSON_SINCE
            form = ["--json"] if as_json else ["--noheader", f"--Format={SQUEUE_FORMAT}"]
            output = self._commands.run("squeue", f"--user={own_user()}", "--states=all", *form)
            found = parse_squeue_json(output) if as_json else parse_squeue_text(output)
        except (Refused, ValueError) as error:
            raise EngineUnreachable(f"Slurm: squeue: {error}") from None
        jobs: dict[str, list[JobRecord]] = {}
        for job in sorted(found, key=lambda job: job.id):
            jobs.setdefault(job.name, []).append(job)
        return jobs
