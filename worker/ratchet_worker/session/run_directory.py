"""The checkpoint directory of a run without a service. Its layout (``JobPaths``) is that of a job, so that a service can take it
over. Each start of the run is an attempt::

    ratchet-checkpoints/ratchet-run.json     the run's id
    ratchet-checkpoints/agent.lock           locked while a start of the run is open
    ratchet-checkpoints/checkpoints/step-000000000040.a0002/
    ratchet-checkpoints/quarantine/          damaged checkpoints
    ratchet-checkpoints/attempts/0002/       files of the second start
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ratchet_contract.atomic_write import ensure_dir, write_atomic
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import CheckpointError, UserError
from ratchet_contract.paths import MANIFEST_NAME, JobPaths, NodePaths
from ratchet_contract.protocol.lineage import lineage
from ratchet_contract.protocol.messages import LaunchFile, Metrics
from ratchet_contract.spec.checkpoint import BestSpec, CheckpointSpec
from ratchet_store.format.manifest_file import checkpoint_dirs, read_manifest
from ratchet_store.read.run_directory import RunDirectory
from ratchet_store.retention.delete import complete_checkpoints, delete_unless_pinned, sweep
from ratchet_store.retention.rules import Id, Rules
from ratchet_worker.agent.attempt_files import lock


class StandaloneDirectory:
    """The directory of a run without a service, created if missing, and locked until ``close``. Raises ``UserError`` if it is
    locked already, or if the directory has parts of a run but no run's id; ``OSError`` if it cannot be used."""

    def __init__(self, root: Path) -> None:
        self.paths = JobPaths(root)
        self._run = RunDirectory(self.paths)
        held = lock(NodePaths(root))
        if held is None:
            raise UserError(
                f"another process trains with the checkpoints in {root}: wait until it ends, or give this one a directory of its "
                'own (Session("other-directory"))',
                code="directory-in-use",
            )
        self._lock: int | None = held
        os.register_at_fork(after_in_child=self.close)  # worker processes that the script forks may survive a kill
        try:
            self.id = self._read_or_create_id()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the directory's lock; in a forked process, only close its descriptor. Safe to call repeatedly."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin_attempt(self, facts: Mapping[str, Any]) -> LaunchFile:
        """Create the next attempt: write its ``launch.json``, with ``facts`` among its fields, and return the content. Raises
        ``UserError`` if there are checkpoints but no attempt has recorded its base, or if the recorded bases contradict each
        other. May also raise ``CheckpointError`` and ``OSError``."""
        attempts = [e for _, e, at in checkpoint_dirs(self.paths.checkpoints) if (at / MANIFEST_NAME).exists()]
        attempt = max([*self._run.attempt_numbers(), *attempts], default=0) + 1
        try:
            segments = lineage(self._run.bases())
        except ValueError as error:
            raise UserError(
                f"{self.paths.root / 'attempts'} was changed by something else: {error}. Restore it, or give another directory "
                '(Session("other-directory"))',
                code="directory-of-others",
            ) from error
        if attempts and not segments:
            raise UserError(
                f"{self.paths.root} has checkpoints, and {self.paths.root / 'attempts'} does not record which starts made them: "
                'restore it, or give another directory (Session("other-directory"))',
                code="directory-of-others",
            )
        paths = self.paths.attempt(attempt)
        launch = LaunchFile(
            **facts,
            job_id=self.id,
            attempt=attempt,
            job_root=str(self.paths.root),
            attempt_dir=str(paths.root),
            lineage=segments,
            report_token="",
            service_file="",
        )
        ensure_dir(paths.root)
        write_atomic(paths.launch_file, launch.model_dump_json().encode(), durable=True)
        return launch

    def _read_or_create_id(self) -> str:
        """Return the run's id, a new one for a directory without a run. Raises ``UserError`` if it has parts of a run but no
        id."""
        if found := self._run.id():
            return found
        theirs = [path for path in (self.paths.checkpoints, self.paths.root / "attempts") if path.exists()]
        if self._run.mark.exists() or theirs:
            raise UserError(
                f"{self.paths.root} is no directory of a run without a service: {self._run.mark} is missing or has no id. Give "
                'another directory (Session("other-directory"))',
                code="directory-of-others",
            )
        made = f"job-{secrets.token_hex(6)}"
        write_atomic(self._run.mark, json.dumps({"id": made}).encode(), durable=True)
        return made

    def delete_surplus(self, spec: CheckpointSpec) -> list[str]:
        """Delete unfinished checkpoints of the run's attempts, and unpinned ones of the lineage that ``spec`` does not keep.
        Return one sentence for each failure."""
        notes = list[str]()
        try:
            bases = self._run.bases()
            # Also this start's own unfinished ones: the caller calls this before training and after the last save.
            sweep(self.paths.checkpoints, dead_attempts=[*self._run.attempt_numbers()])
            found = complete_checkpoints(self.paths.checkpoints, lineage(bases))
            first = [one for one in found if read_manifest(self.paths.checkpoint(*one)).reason == "first"]
            values = {} if spec.keep_best is None else self._metric_values(spec.keep_best, found, bases)
        except CheckpointError as error:
            return [error.detail]
        except OSError as error:
            return [f"surplus checkpoints are not deleted: {error}"]
        pinned = [one for one, is_pinned in found.items() if is_pinned]
        for one in Rules.from_spec(spec).surplus([*found], values, pinned, first):
            try:
                delete_unless_pinned(self.paths.checkpoint(*one))
            except CheckpointError as error:
                notes.append(error.detail)
        return notes

    def _metric_values(self, best: BestSpec, found: Collection[Id], bases: Mapping[int, Base]) -> dict[Id, float]:
        """Return the metric ``best`` by checkpoint (step, attempt): the value in rank 0's last message at that step that has this
        metric. Checkpoints without one are left out."""
        values: dict[Id, float] = {}
        for attempt, base in sorted(bases.items()):
            for step, logged in self._logged_metrics(attempt):
                # At its base's step an attempt may log a value for the base; a newer attempt's value replaces an older one's.
                at = (step, attempt) if (step, attempt) in found else (base.step, base.attempt)
                if at in found and at[0] == step and best.metric in logged:
                    values[step, at[1] or 0] = logged[best.metric]
        return values

    def _logged_metrics(self, attempt: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, metrics by name) for each undamaged metrics message of rank 0 in ``attempt``; nothing without a spool."""
        spool = self.paths.attempt(attempt).spool(0)
        if not spool.exists():
            return
        with spool.open("rb") as lines:
            for line in lines:
                if b'"metrics"' in line and line.endswith(b"\n"):
                    with suppress(ValidationError):  # a line of another kind, or one that a power loss has damaged
                        message = Metrics.model_validate_json(line)
                        yield message.step, message.values
