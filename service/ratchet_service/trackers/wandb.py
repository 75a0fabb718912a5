"""Sends runs to W&B. A run's points are appended to a file, from which the package ``wandb``, in a process of its own
(``wandb_child``), writes the run over all attempts of its job.

Offline, that is one directory at the run's end, which ``wandb sync`` uploads: W&B makes a directory for each process that logs
offline, and its versions differ in what they make of several directories of one run (wandb/wandb#3841; ``wandb sync --help`` of
0.31).

Online, each upload resumes the run. W&B stores history as lines, and the package drops a row whose step is not greater than
that of the last line (``handlePartialHistorySync`` in core/internal/stream/handler.go). Series may come late at a lower step.
So line n of the file is W&B's step n and line n of its history, and the training step is a metric, which charts use. A resumed
run (``processResponse`` in core/internal/runbranch/resume.go) appends at the offset ``historyLineCount``, and its first step is
one after ``_step`` of the history, or of the summary if that is newer (seen with 0.31). The upload sends the file from the line
of that number on if both agree. A line that is sent twice, because a process was killed before it knew that W&B had stored it,
goes to the same offset with the same values, even from two processes at once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

from ratchet_contract.atomic_write import ensure_dir, fsync_path
from ratchet_contract.env_vars import ENDS_WITH
from ratchet_contract.phases import JobPhase
from ratchet_contract.processes.parent_death import process_name
from ratchet_service.isolation.sandbox import minimal_environ
from ratchet_service.isolation.subprocess_query import last_line, query_process
from ratchet_service.trackers.sink import Batch, End, Run, State, TrackerError
from ratchet_service.trackers.text import cut, fitting, joined, note_line

_SECONDS: Final = 60.0
"""For a process that writes a directory, and one more for each 30 kB of points: about ten times what it takes."""
_UPLOAD_SECONDS: Final = 240.0
"""For a process that uploads. The next one continues after the rows that W&B has."""
_COUNT_SECONDS: Final = 30.0
"""Within which W&B must have stored what it has accepted."""
_PAUSE: Final = 30.0
"""Seconds between two uploads of a run, except the last one."""
_MAX_NOTES: Final = 8000
"""Characters of a run's notes."""
_KEY: Final = "WANDB_API_KEY"
_ONLINE: Final = (
    _KEY, "WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
# Limits: validate_project and validate_run_tags in wandb/sdk/wandb_settings.py.
_NOT_IN_PROJECT: Final = re.compile(r"[/\\#?%:]")
_MAX_PROJECT: Final = 128
_MAX_TAG: Final = 64
_SETTINGS: Final = {"WANDB_ERROR_REPORTING": "false"}  # to Sentry: wandb/env.py


class WandbSink:
    """Keeps a run in ``directory/NAME``: ``points.jsonl``, and offline at its end the directory ``offline-run-DATE-NAME``.
    Online, the account is that of the service's environment: WANDB_API_KEY, WANDB_BASE_URL and WANDB_ENTITY."""

    name = "wandb"

    def __init__(self, directory: Path, mode: Literal["offline", "online"] = "offline") -> None:
        self._directory, self._mode = directory, mode
        self._uploaded: dict[str, float] = {}  # monotonic time of a run's last upload

    def export(self, run: Run, state: State, batch: Batch) -> State:
        """Append the batch at the length of the file in ``state``, so that a repeated batch replaces itself. Online, upload it
        unless more follows now or the last upload was less than 30 s ago. With the end, upload it or write the directory."""
        path = self._directory / run.name / "points.jsonl"
        lines = [*state.get("notes", ()), *map(note_line, batch.notes)]
        notes, left_out = fitting(lines, state.get("left_out", 0), _MAX_NOTES)
        try:
            size = _append(path, state.get("bytes", 0), batch)
        except OSError as error:
            raise TrackerError(f"W&B: {error}: check the space and the permissions of {self._directory}") from None
        state = {**state, "bytes": size, "notes": notes, "left_out": left_out}
        if self._mode == "offline":
            made = path.parent if batch.end is None else self.write_offline_run(run, state, batch.end)
            state = {**state, "path": str(made)}
        elif batch.end is not None or (batch.last and self._is_due(run)):
            state = self._upload(run, state, batch.end)
        return state

    def write_offline_run(self, run: Run, state: State, end: End | None = None) -> Path:
        """Write the offline directory of what was exported until ``state``, and return its path. An earlier one is replaced.
        ``end``: None if the job has not ended. Raise ``TrackerError``."""
        folder = self._directory / run.name
        target = folder / f"offline-run-{run.created_at:%Y%m%d_%H%M%S}-{run.name}"
        seconds = _SECONDS + state["bytes"] / 30_000
        with _temporary(folder) as tmp:
            question = _question(folder, tmp, run, state, end)
            answer = _ask_child(tmp, question, {}, seconds, f"the offline run {run.name} was not written")
            made = Path(answer["directory"])
            shutil.rmtree(made / "logs")  # has links into ``tmp``
            for path in (*made.rglob("*"), made):
                fsync_path(path)
            if target.exists():
                target.rename(tmp / "replaced")
            made.rename(target)
            fsync_path(folder)
        return target

    def _is_due(self, run: Run) -> bool:
        last = self._uploaded.get(run.name)
        return last is None or time.monotonic() >= last + _PAUSE

    def _upload(self, run: Run, state: State, end: End | None) -> State:
        """Upload what was exported until ``state``, and return the new state: ``url``, the page of the run, and how many rows, in
        how many bytes of the file, W&B has."""
        folder = self._directory / run.name
        env = {name: value for name in _ONLINE if (value := os.environ.get(name))}
        with _temporary(folder) as tmp:
            sent = {"sent_rows": state.get("sent_rows", 0), "sent_bytes": state.get("sent_bytes", 0)}
            question = {**_question(folder, tmp, run, state, end), **sent, "online": True, "ended": end is not None}
            question |= {"is_new": "url" not in state, "count_seconds": _COUNT_SECONDS}
            answer = _ask_child(tmp, question, env, _UPLOAD_SECONDS, f"the run {run.name} was not uploaded")
        self._uploaded[run.name] = time.monotonic()
        if end is not None:
            del self._uploaded[run.name]
        return {**state, "url": answer["url"], "sent_rows": answer["rows"], "sent_bytes": state["bytes"]}


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Yield a temporary directory in ``folder``, from which those of a killed service are removed. ``OSError`` becomes
    ``TrackerError``."""
    try:
        for left in folder.glob(".tmp-*"):
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as tmp:
            yield Path(tmp)
    except OSError as error:
        raise TrackerError(f"W&B: {error}: check the space and the permissions of {folder}") from None


def _append(path: Path, size: int, batch: Batch) -> int:
    """Cut the file to ``size`` bytes, append the batch, and return the new size once it is on the disk."""
    lines = "".join(json.dumps(line) + "\n" for line in _lines(batch)).encode()
    is_new = not path.exists()
    if is_new:
        ensure_dir(path.parent)
    with path.open("ab") as file:
        found = os.fstat(file.fileno()).st_size
        if found < size:
            raise TrackerError(f"W&B: {path} has {found} bytes, and {size} were written: restore it from a backup")
        file.truncate(size)
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        fsync_path(path.parent)
    return size + len(lines)


def _lines(batch: Batch) -> Iterator[dict[str, Any]]:
    """Yield a line for each step: seconds since 1970, and the values by name."""
    for step, points in groupby(batch.points, lambda point: point.step):
        of_step = list(points)
        values = {point.name: point.value for point in of_step}
        yield {"step": step, "at": max(point.at for point in of_step).timestamp(), "values": values}


def _question(folder: Path, tmp: Path, run: Run, state: State, end: End | None) -> dict[str, Any]:
    """Return what ``wandb_child`` needs to know."""
    about: dict[str, Any] = {"job_id": run.job_id, "run": run.name, "owner": run.owner, "labels": dict(run.labels)}
    about |= {"created_at": run.created_at.isoformat(), "parent": run.parent}
    summary: dict[str, Any] = {}
    if end is not None:
        summary = {f"ratchet/{name}": value for name, value in end.summary.items()}
        summary |= {"ratchet/status": end.status, "ratchet/checkpoint": end.checkpoint}
    return {
        "points": str(folder / "points.jsonl"),
        "bytes": state["bytes"],
        "root": str(tmp),
        "online": False,
        "id": run.name,
        "name": run.job_name,
        "group": run.job_id,
        "project": _NOT_IN_PROJECT.sub("-", run.experiment)[:_MAX_PROJECT],
        "tags": sorted({cut(f"{key}={value}", _MAX_TAG) for key, value in run.labels.items()}),
        "notes": joined(state["notes"], state["left_out"]),
        "config": {**run.parameters, "ratchet": about},
        "summary": summary,
        "exit_code": 0 if end is None or end.status == JobPhase.SUCCEEDED else 1,
    }


def _ask_child(
    tmp: Path, question: dict[str, Any], account: dict[str, str], seconds: float, failure: str
) -> dict[str, Any]:
    """Let a process write the run, and return its answer. ``account``: variables for an online run. Raise ``TrackerError``."""
    # nothing of W&B's own variables but the account: others, such as WANDB_RUN_ID, are those of one process's runs
    env = minimal_environ(os.environ) | _SETTINGS | {ENDS_WITH: process_name(os.getpid()), "TMPDIR": str(tmp)} | account
    env |= {f"WANDB_{name}_DIR": str(tmp / "home") for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT")}
    if entity := os.environ.get("WANDB_ENTITY"):
        env["WANDB_ENTITY"] = entity
    command = [sys.executable, "-P", "-m", "ratchet_service.trackers.wandb_child"]
    cure = ": check WANDB_API_KEY, WANDB_BASE_URL and WANDB_ENTITY of the service, and its network" if account else ""
    with tempfile.TemporaryFile() as stderr:
        try:
            answer = query_process(command, question, cwd=str(tmp), env=env, timeout_seconds=seconds, stderr=stderr)
        except TimeoutError:
            text = f"W&B: {failure} within {seconds:.0f} s: {last_line(stderr)}"
        except ValueError as error:
            text = f"W&B: {failure}: its process failed: {error}: {last_line(stderr)}"
        else:
            if "error" not in answer:
                return answer
            text, cure = f"W&B: {failure}: {answer['error']}", answer.get("cure", cure)
    raise TrackerError((text + cure).replace(account.get(_KEY, _KEY), _KEY))
