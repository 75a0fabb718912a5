"""Writes runs for W&B: one offline directory for each run, over all attempts of its job, which ``wandb sync`` uploads.

W&B makes a directory for each process that logs offline, and its versions differ in what they make of several directories of
one run (wandb/wandb#3841; ``wandb sync --help`` of 0.31). So a run's points are first appended to a file, and one directory is
written from it at the run's end, by the package ``wandb`` in a process of its own (``wandb_child``).

There is no online mode: W&B drops a row whose step is not greater than the last one, and series may come late at a lower step."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from ratchet_contract.atomic_write import ensure_dir, fsync_path
from ratchet_contract.env_vars import ENDS_WITH
from ratchet_contract.phases import JobPhase
from ratchet_contract.processes.parent_death import process_name
from ratchet_service.isolation.sandbox import minimal_environ
from ratchet_service.isolation.subprocess_query import last_line, query_process
from ratchet_service.trackers.sink import Batch, End, Run, State, TrackerError
from ratchet_service.trackers.text import cut, note_line

_SECONDS: Final = 60.0
"""For a process that writes a directory, and one more for each 30 kB of points: about ten times what it takes."""
# Limits: validate_project and validate_run_tags in wandb/sdk/wandb_settings.py.
_NOT_IN_PROJECT: Final = re.compile(r"[/\\#?%:]")
_MAX_PROJECT: Final = 128
_MAX_TAG: Final = 64
_SETTINGS: Final = {
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",  # to Sentry: wandb/env.py
}


class WandbSink:
    """Writes a run to ``directory/NAME``: ``points.jsonl``, and at its end the directory ``offline-run-DATE-NAME``."""

    name = "wandb"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def export(self, run: Run, state: State, batch: Batch) -> State:
        """Append the batch at the length of the file in ``state``, so that a repeated batch replaces itself. With the end, also
        write the offline directory."""
        path = self._directory / run.name / "points.jsonl"
        try:
            state = {"bytes": _append(path, state.get("bytes", 0), batch)}
        except OSError as error:
            raise TrackerError(f"W&B: {error}: check the space and the permissions of {self._directory}") from None
        if batch.end is not None:
            self.write_offline_run(run, state, batch.end)
        return state

    def write_offline_run(self, run: Run, state: State, end: End | None = None) -> Path:
        """Write the offline directory of what was exported until ``state``, and return its path. An earlier one is replaced.
        ``end``: None if the job has not ended. Raise ``TrackerError``."""
        folder = self._directory / run.name
        target = folder / f"offline-run-{run.created_at:%Y%m%d_%H%M%S}-{run.name}"
        try:
            for left in folder.glob(".tmp-*"):  # of a killed service
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as tmp:
                made = _ask_child(folder, state["bytes"], Path(tmp), _request(run, end))
                shutil.rmtree(made / "logs")  # has links into ``tmp``
                for path in (*made.rglob("*"), made):
                    fsync_path(path)
                if target.exists():
                    target.rename(Path(tmp) / "replaced")
                made.rename(target)
                fsync_path(folder)
        except OSError as error:
            raise TrackerError(f"W&B: {error}: check the space and the permissions of {folder}") from None
        return target


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
    """Yield a line for each step (seconds since 1970, and the values by name), and one for each note."""
    for step, points in groupby(batch.points, lambda point: point.step):
        of_step = list(points)
        values = {point.name: point.value for point in of_step}
        yield {"step": step, "at": max(point.at for point in of_step).timestamp(), "values": values}
    for note in batch.notes:
        yield {"note": note_line(note)}


def _request(run: Run, end: End | None) -> dict[str, Any]:
    """Return what ``wandb_child`` needs to know of the run."""
    about: dict[str, Any] = {"job_id": run.job_id, "run": run.name, "owner": run.owner, "labels": dict(run.labels)}
    about |= {"created_at": run.created_at.isoformat(), "parent": run.parent}
    summary: dict[str, Any] = {}
    if end is not None:
        summary = {f"ratchet/{name}": value for name, value in end.summary.items()}
        summary |= {"ratchet/status": end.status, "ratchet/checkpoint": end.checkpoint}
    return {
        "id": run.name,
        "name": run.job_name,
        "group": run.job_id,
        "project": _NOT_IN_PROJECT.sub("-", run.experiment)[:_MAX_PROJECT],
        "tags": sorted({cut(f"{key}={value}", _MAX_TAG) for key, value in run.labels.items()}),
        "config": {**run.parameters, "ratchet": about},
        "summary": summary,
        "exit_code": 0 if end is None or end.status == JobPhase.SUCCEEDED else 1,
    }


def _ask_child(folder: Path, size: int, tmp: Path, request: dict[str, Any]) -> Path:
    """Let a process write the offline directory below ``tmp``, and return its path. Raise ``TrackerError``."""
    # nothing of W&B's own variables but the account: others, such as WANDB_RUN_ID, are those of one process's runs
    env = minimal_environ(os.environ) | _SETTINGS | {ENDS_WITH: process_name(os.getpid()), "TMPDIR": str(tmp)}
    env |= {f"WANDB_{name}_DIR": str(tmp / "home") for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT")}
    if entity := os.environ.get("WANDB_ENTITY"):
        env["WANDB_ENTITY"] = entity
    question = {**request, "points": str(folder / "points.jsonl"), "bytes": size, "root": str(tmp)}
    seconds = _SECONDS + size / 30_000
    command = [sys.executable, "-P", "-m", "ratchet_service.trackers.wandb_child"]
    with tempfile.TemporaryFile() as stderr:
        try:
            answer = query_process(command, question, cwd=str(tmp), env=env, timeout_seconds=seconds, stderr=stderr)
        except TimeoutError:
            raise TrackerError(f"W&B: the offline run {request['id']} was not written within {seconds:.0f} s") from None
        except ValueError as error:
            raise TrackerError(
                f"W&B: the process that writes the offline run {request['id']} failed: {error}: {last_line(stderr)}"
            ) from None
    if "error" in answer:
        raise TrackerError(f"W&B: the offline run {request['id']} was not written: {answer['error']}")
    return Path(answer["directory"])
