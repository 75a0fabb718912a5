"""Saving: every rank writes its file, rank 0 commits the manifest. No collective takes part in the exchange.

A rank that dies while a checkpoint is made only fails this checkpoint. What failed is told, and work goes on; the third
failure in a row ends the attempt, since a job that cannot save will lose what it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ratchet_contract.errors import CheckpointError, RatchetError, UserError
from ratchet_contract.manifest import FileEntry, Manifest, TensorEntry
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import JobPaths
from ratchet_contract.resume import Base, Segment
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.specs import CustomSpec
from ratchet_hooks.summary import HookSummary
from ratchet_store.commit import commit, mark_finished
from ratchet_store.rankfile import write_rank_file
from ratchet_store.retain import retain
from ratchet_worker.content import Content
from ratchet_worker.counter import Stage, StepCounter
from ratchet_worker.exchange import Exchange, PeerTimeout
from ratchet_worker.reporter import Reason, Reporter
from ratchet_worker.snapshot import digest, digests

MAX_FAILURES: Final = 3


@dataclass(frozen=True)
class Outcome:
    """``error`` None: committed."""

    error: str | None = None


class Checkpointer:
    """Saves of one attempt on one rank. ``last`` is the newest checkpoint of this attempt, or what it started from."""

    def __init__(
        self, launch: LaunchFile, exchange: Exchange, counter: StepCounter, reporter: Reporter, base: Base
    ) -> None:
        self._launch, self._exchange, self._counter, self._reporter = launch, exchange, counter, reporter
        self._job = JobPaths(Path(launch.job_root))
        self._base = base
        self._saves = 0
        self._failures = 0
        self._committed: tuple[Manifest, float] | None = None  # rank 0: the newest of this attempt, and its seconds
        self.last = base

    def save(self, step: int, reason: Reason, finished: bool, content: Callable[[], Content]) -> Outcome:
        """Save ``step`` on every rank; the outcome is the same on all. Raises ``CheckpointError`` for the third failure in a
        row (``finished``: tried three times), ``UserError`` at once for a hook's state that cannot be stored and where only
        some ranks have ``finished``, and ``PeerTimeout`` when rank 0 does not answer."""
        self._counter.stage(Stage.CHECKPOINTING)
        while True:
            outcome = self._attempt(step, reason, finished, content)
            self._counter.tick()
            if outcome.error is None:
                self._failures = 0
                break
            self._failures += 1
            if self._exchange.rank == 0:
                self._reporter.checkpoint_failed(step, outcome.error)
            if self._failures >= MAX_FAILURES:
                raise CheckpointError(f"{MAX_FAILURES} saves in a row failed, the last at step {step}: {outcome.error}")
            if not finished:
                break
            time.sleep(1.0)
        self._counter.stage(Stage.TRAINING)
        return outcome

    def finish(self) -> None:
        """The newest checkpoint of this attempt was the job's last, which only shows now: a resume from it has nothing left to
        do. Without effect where that is known. Raises ``CheckpointError``."""
        if self._committed is None or self._committed[0].finished:
            return
        manifest, seconds = self._committed
        mark_finished(self._job.checkpoint(manifest.step, manifest.epoch))
        self._committed = manifest.model_copy(update={"finished": True}), seconds
        self._reporter.committed(*self._committed)

    def _attempt(self, step: int, reason: Reason, finished: bool, content: Callable[[], Content]) -> Outcome:
        self._saves += 1
        name, begun = f"save/{self._saves}", time.monotonic()
        mine: Content | None = None
        try:
            mine = content()
            report = {**self._write(step, mine), "finished": finished}
        except HookStateError as error:  # comes again with every save: nothing more is trained that cannot be kept
            text = f"the state of the hook cannot be saved at step {step}: {error}"
            raise UserError(text, code="hook-state-unsupported") from error
        except (RatchetError, OSError, MemoryError) as error:
            report = {"error": f"rank {self._exchange.rank}: {error}"}
        self._counter.tick()
        self._exchange.post(name, report)
        verdict: dict[str, Any] = {}
        if self._exchange.rank == 0:
            verdict = self._decide(name, step, reason, finished, mine, begun)
        # Rank 0 may wait for the last report for as long as the deadline says.
        verdict = self._exchange.broadcast(
            f"{name}/verdict", verdict, timeout=2 * self._launch.spec.policy.step_deadline + 60
        )
        if verdict.get("parted"):
            raise UserError(verdict["error"])
        if verdict.get("diverged") and mine is not None:
            verdict["error"] = self._name_divergence(name, mine)
        if verdict["error"] is None:
            self.last = Base.model_validate(verdict["base"])
            self._forget()
        return Outcome(verdict["error"])

    def _write(self, step: int, content: Content) -> dict[str, Any]:
        exchange = self._exchange
        pieces = content.snapshot.pieces(exchange.rank, exchange.world_size)
        directory = self._job.checkpoint(step, self._launch.epoch)
        file, tensors = write_rank_file(directory, exchange.rank, exchange.world_size, pieces, content.snapshot.state)
        return {
            "error": None,
            "file": file.model_dump(),
            "tensors": [entry.model_dump() for entry in tensors],
            "shared": digest(content.snapshot.shared.values()),
            "summary": content.summary.model_dump_json(),
        }

    def _decide(
        self, name: str, step: int, reason: Reason, finished: bool, mine: Content | None, begun: float
    ) -> dict[str, Any]:
        """Rank 0: all reports in, replicas equal, manifest committed; else what went wrong."""
        try:
            reports = self._exchange.collect(name, timeout=self._launch.spec.policy.step_deadline)
        except PeerTimeout as error:
            return {"error": str(error)}
        errors = [r["error"] for r in reports if r["error"] is not None]
        if errors or mine is None:
            return {"error": "; ".join(errors)}
        ended = [rank for rank, report in enumerate(reports) if report["finished"]]
        if ended and len(ended) < len(reports):
            text = f"rank {ended} ended after step {step}, others go on: leave the loop on all ranks in the same step"
            return {"error": text, "parted": True}
        if len({r["shared"] for r in reports}) > 1:
            return {"error": "replicas have diverged", "diverged": True}
        try:
            manifest = commit(
                self._job.checkpoint(step, self._launch.epoch), self._manifest(step, reason, finished, mine, reports)
            )
        except (RatchetError, OSError) as error:
            return {"error": str(error)}
        self._committed = manifest, time.monotonic() - begun
        self._reporter.committed(*self._committed)
        self._retain()
        return {"error": None, "base": manifest.base.model_dump()}

    def _manifest(
        self, step: int, reason: Reason, finished: bool, mine: Content, reports: list[dict[str, Any]]
    ) -> Manifest:
        launch = self._launch
        return Manifest(
            job_id=launch.job_id,
            step=step,
            epoch=launch.epoch,
            parent=self.last,
            world_size=launch.world_size,
            created=datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            reason=reason,
            spec_digest=launch.spec.digest(),
            code_digest=launch.resolved.code_digest,
            data_digest=mine.data_digest,
            total_steps=mine.total_steps,
            replicas=mine.replicas,
            shared_digest=reports[0]["shared"] if mine.snapshot.shared else None,
            bucket_layout=mine.layout,
            hook=mine.hook,
            hook_summaries=[HookSummary.model_validate_json(r["summary"]) for r in reports],
            environment=mine.environment,
            finished=finished,
            files=[FileEntry.model_validate(r["file"]) for r in reports],
            tensors=[TensorEntry.model_validate(t) for r in reports for t in r["tensors"]],
        )

    def _retain(self) -> None:
        """Rank 0: delete what is beyond ``keep_last``. A failure to delete costs disk space, not the checkpoint."""
        launch = self._launch
        lineage = [*launch.lineage, Segment(epoch=launch.epoch, after_step=self._base.step)]
        protected = [(self._base.step, self._base.epoch)] if self._base.epoch is not None else []
        try:
            for step, epoch in retain(
                self._job.checkpoints,
                keep_last=launch.spec.checkpoint.keep_last,
                lineage=lineage,
                epoch=launch.epoch,
                protected=protected,
            ):
                self._reporter.deleted(step, epoch)
        except RatchetError as error:
            self._reporter.note("checkpoint-not-deleted", str(error))

    def _name_divergence(self, name: str, mine: Content) -> str:
        """Every rank tells a digest per shared tensor; the first that differs is named, with the ranks."""
        try:
            found = self._exchange.gather(f"{name}/digests", digests(mine.snapshot.shared))
        except PeerTimeout as error:
            return f"replicas have diverged; {error}"
        for tensor in found[0]:
            values = [ranks.get(tensor) for ranks in found]
            if len(set(values)) > 1:
                odd = [rank for rank, value in enumerate(values) if value != values[0]]
                text = f"replicas have diverged: {tensor} of rank {odd} differs from rank 0's; nothing was saved"
                return text + self._advice()
        return "replicas have diverged: the ranks hold different sets of tensors; nothing was saved"

    def _advice(self) -> str:
        hook = self._launch.spec.hook
        if not isinstance(hook, CustomSpec):
            return ""
        return (
            f". Hook {hook.hook} is to give every rank the same average (hook.replicas: equal): mend it, or set hook.replicas: "
            "rank if the ranks' parameters are meant to differ"
        )

    def _forget(self) -> None:
        """Rank 0 clears the store of a save that all ranks are past: they have reported for the next one since."""
        if self._exchange.rank == 0 and self._saves > 1:
            for name in (
                f"save/{self._saves - 1}",
                f"save/{self._saves - 1}/verdict",
                f"save/{self._saves - 1}/digests",
            ):
                self._exchange.forget(name)
