"""The directory that a run without a service saves to, as rank 0 sees to it. It is laid out as the service lays out a job's own
(``JobPaths``), under an id of the same form, so that a service can take it over::

    ratchet-checkpoints/ratchet-run.json     the run's id
    ratchet-checkpoints/agent.lock           held while a start of the script is at work
    ratchet-checkpoints/checkpoints/step-000000000040.a0002/
    ratchet-checkpoints/quarantine/          damaged ones, moved here whole
    ratchet-checkpoints/attempts/0002/       the second start: launch.json, base.json, spool, counters, fingerprints

Each start is an attempt. Nothing is deleted but checkpoints of the run that its spec does not keep, and what a kill left of one.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ratchet_contract.errors import CheckpointError, UserError
from ratchet_contract.lineage import lineage
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import MANIFEST_NAME, JobPaths, NodePaths
from ratchet_contract.resume import Base
from ratchet_contract.spec_checkpoint import BestSpec, CheckpointSpec
from ratchet_store.commit import checkpoint_dirs, read_manifest
from ratchet_store.keeping import Id, Rules
from ratchet_store.retain import delete_unless_pinned, sweep, whole
from ratchet_store.run_directory import RunDirectory
from ratchet_worker.agent_files import lock
from ratchet_worker.files import write_atomic


class StandaloneDirectory:
    """Held by this process until ``close``, or its end. Raises ``UserError`` where another holds it (``directory-in-use``), or it
    is none of a run (``directory-of-others``), and ``OSError``."""

    def __init__(self, root: Path) -> None:
        self.paths = JobPaths(root)
        self._run = RunDirectory(self.paths)
        root.mkdir(parents=True, exist_ok=True)
        held = lock(NodePaths(root))
        if held is None:
            raise UserError(
                f"another process trains with the checkpoints in {root}: wait for its end, or give this one a directory of its "
                'own (Session("other-directory"))',
                code="directory-in-use",
            )
        self._lock: int | None = held
        os.register_at_fork(after_in_child=self.close)  # workers that the script forks may live on behind a kill
        try:
            self.id = self._identify()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin(self, facts: Mapping[str, Any]) -> LaunchFile:
        """The next attempt, written to its ``launch.json``. ``facts``: of the launch file, all that does not follow from the
        directory. Raises ``UserError`` for checkpoints whose attempts are not there."""
        epochs = [e for _, e, at in checkpoint_dirs(self.paths.checkpoints) if (at / MANIFEST_NAME).exists()]
        epoch = max([*self._run.numbers(), *epochs], default=0) + 1
        segments = lineage(self._run.bases())
        if epochs and not segments:
            raise UserError(
                f"{self.paths.root} has checkpoints, and {self.paths.root / 'attempts'} does not tell which starts made them: "
                'put it back, or give another directory (Session("other-directory"))',
                code="directory-of-others",
            )
        paths = self.paths.attempt(epoch)
        launch = LaunchFile(
            **facts,
            job_id=self.id,
            epoch=epoch,
            job_root=str(self.paths.root),
            attempt_dir=str(paths.root),
            lineage=segments,
            save_seconds=0.0,
            report_token="",
            service_file="",
        )
        write_atomic(paths.launch_file, launch.model_dump_json().encode(), durable=True)
        return launch

    def _identify(self) -> str:
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

    def tidy(self, spec: CheckpointSpec) -> list[str]:
        """Before a start trains, and behind its last save; while it trains it deletes only what it wrote itself. Returns what
        could not be deleted, in sentences."""
        notes, bases = [], self._run.bases()
        try:
            sweep(self.paths.checkpoints, dead_epochs=[*self._run.numbers()])
            found = whole(self.paths.checkpoints, lineage(bases))
            first = [one for one in found if read_manifest(self.paths.checkpoint(*one)).reason == "first"]
        except CheckpointError as error:
            return [error.detail]
        pinned = [one for one, is_pinned in found.items() if is_pinned]
        values = {} if spec.keep_best is None else self._values(spec.keep_best, found, bases)
        for one in Rules.of(spec).surplus([*found], values, pinned, first):
            try:
                delete_unless_pinned(self.paths.checkpoint(*one))
            except CheckpointError as error:
                notes.append(error.detail)
        return notes

    def _values(self, best: BestSpec, found: Collection[Id], bases: Mapping[int, Base]) -> dict[Id, float]:
        """What was logged at exactly a checkpoint's step, by the attempt that wrote it or one that started from it."""
        values: dict[Id, float] = {}
        for epoch, base in sorted(bases.items()):
            for step, logged in self._logged(epoch):
                at = (step, epoch) if (step, epoch) in found else (base.step, base.epoch)
                if at in found and at[0] == step and best.metric in logged:
                    values[step, at[1] or 0] = float(logged[best.metric])
        return values

    def _logged(self, epoch: int) -> Iterator[tuple[int, dict[str, Any]]]:
        spool = self.paths.attempt(epoch).spool(0)
        if not spool.exists():
            return
        with spool.open("rb") as lines:
            for line in lines:
                if b'"metrics"' in line and line.endswith(b"\n"):
                    message = json.loads(line)
                    if message["kind"] == "metrics":
                        yield message["step"], message["values"]
