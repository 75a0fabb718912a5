"""Rank 0's part of a save: collect all reports, check that they agree, commit the manifest, delete older checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ratchet_contract.checkpoint.manifest import Manifest, TensorEntry, parse_entries
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.errors import RatchetError
from ratchet_contract.paths import JobPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_hooks.specs.hook_specs import CustomSpec
from ratchet_store.format.manifest_file import ManifestWriter, mark_finished
from ratchet_store.retention.attempt_retention import Keeper
from ratchet_worker.checkpoint.checkpoint_content import Content
from ratchet_worker.coordination.reporter import Reason, Reporter
from ratchet_worker.coordination.store_exchange import Exchange, PeerTimeout
from ratchet_worker.ipc.save_reports import complete, first_difference
from ratchet_worker.state import replica_digests


@dataclass(frozen=True)
class Order:
    """The facts of a save. ``number``: counts the attempt's saves from 1; ``finished``: the job ends at ``step``; ``concurrent``:
    the state is copied during the next step."""

    number: int
    step: int
    reason: Reason
    finished: bool
    started_at: float
    concurrent: bool = False

    @property
    def name(self) -> str:
        return f"save/{self.number}"


_CHANGED_DURING_COPY: Final = (
    "{}. Code other than optimizer.step() changed it while it was copied during the next step, or the replicas have diverged: "
    "the next save, which is copied before a step begins, shows which"
)
_POLL_SECONDS: Final = 0.002
"""Longest pause, in seconds, between two polls for reports that may be due: only one rank polls, and a save is not safe before
it has them."""
DIVERGED: Final = "replicas have diverged"
Verdict = dict[str, Any]
"""The result of a save. ``error`` None: committed, ``base`` is the new checkpoint. ``parted``: the ranks have ended at, or saved,
different steps. ``early``: a tensor may have changed before it was copied; all ranks copy before each step from now on.
``diverged``: the first tensor that differs between ranks (null: they have different sets of tensors), whose likely cause is not
in ``error`` yet. ``failures``: in a row."""


class Committer:
    """Commits the checkpoints of one attempt, on rank 0. ``last``: the newest checkpoint that this attempt has committed;
    before its first commit, what the attempt started from."""

    def __init__(self, launch: LaunchFile, exchange: Exchange, reporter: Reporter, base: Base) -> None:
        self._launch, self._exchange, self._reporter = launch, exchange, reporter
        self._job = JobPaths(Path(launch.job_root))
        self._fence_file = self._job.attempt(launch.attempt).fence_file
        self._spec_digest, self._timeout = launch.spec.digest(), launch.deadlines.step
        self.last, self._cuts = base, replica_digests.Cuts()
        self._listings, self._writer = _Listings(), ManifestWriter()
        protected = [(base.step, base.attempt)] if base.attempt is not None else []
        self._keeper = Keeper(self._job.checkpoints, launch.spec.checkpoint, launch.attempt, protected)
        self._committed: tuple[Manifest, float] | None = None  # the newest of this attempt, and the seconds it took

    def decide(self, order: Order, content: Content | None, stall: Callable[[], float]) -> Verdict:
        """Wait for all ranks' reports on a save, commit its manifest if they agree, and return the verdict. ``content`` None:
        rank 0 itself has failed; ``stall``: returns ``Save.stall``."""
        directory = self._job.checkpoint(order.step, self._launch.attempt)
        try:
            reports_with_listings = self._exchange.collect_with_attachments(
                order.name,
                timeout=self._timeout,
                progress=lambda: write_progress(directory),
                pause=_POLL_SECONDS,
                is_recurring=True,
            )
        except PeerTimeout as error:
            return {"error": str(error)}
        reports = [report for report, _ in reports_with_listings]
        errors = [r["error"] for r in reports if r["error"] is not None]
        if errors or content is None:
            return {"error": "; ".join(errors), "early": any(r.get("early") for r in reports)}
        ended = [rank for rank, report in enumerate(reports) if report["finished"]]
        if ended and len(ended) < len(reports):
            text = f"rank {ended} ended after step {order.step}, others continue: leave the loop on all ranks in the same step"
            return {"error": text, "parted": True}
        if len(set(steps := [report["step"] for report in reports])) > 1:
            text = f"the ranks save different steps, {steps} in rank order: do equal steps and request equal saves on all ranks"
            return {"error": text, "parted": True}
        own = [digests for report in reports for digests in report["parts"]]
        diverged = self._divergence(content, own, [r["seen"] for r in reports])
        if diverged is not None and order.concurrent:
            return {"error": _CHANGED_DURING_COPY.format(diverged[0].removeprefix(f"{DIVERGED}: ")), "early": True}
        if diverged is not None:
            text, name = diverged
            custom = isinstance(self._launch.spec.hook, CustomSpec)
            return {"error": text, "early": True, **({} if custom else {"diverged": name})}
        try:
            tensors = self._listings.parse([listing for _, listing in reports_with_listings])
            if self._fence_file.exists():  # the next attempt may have chosen its base already
                return {"error": "the service has declared this attempt over: its checkpoints no longer count"}
            self._exchange.block_if_aborting()
            manifest = self._writer.commit(directory, complete(self.draft(order, content), reports, tensors))
        except (RatchetError, OSError) as error:
            return {"error": str(error)}
        self.last = manifest.base
        self._committed = manifest, (seconds := time.monotonic() - order.started_at)
        self._reporter.report_committed(*self._committed, min(stall(), seconds))
        return {"error": None, "base": manifest.base.model_dump()}

    def finish(self) -> None:
        """Mark the newest checkpoint of this attempt, if any, on the disk as the job's last, and report it, unless it was saved
        as the last. Raises ``CheckpointError``."""
        if self._committed is None or self._committed[0].finished:
            return
        manifest, seconds = self._committed
        self._exchange.block_if_aborting()
        mark_finished(self._job.checkpoint(manifest.step, manifest.attempt))
        self._committed = manifest.model_copy(update={"finished": True}), seconds
        self._reporter.report_committed(*self._committed)

    def record_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record the value of ``checkpoint.keep_best``'s metric, if it is among ``values``, which were logged at ``step``. Any
        thread may call it."""
        self._keeper.record_metric(step, values)

    def retain(self) -> None:
        """Delete surplus checkpoints of this attempt (``Keeper.on_committed``), and report each deletion. A new failure becomes a
        note."""
        if self._committed is None:
            return
        deleted, notes = self._keeper.on_committed(self._committed[0])
        for step, attempt in deleted:
            self._reporter.report_deleted(step, attempt)
        for kind, text in notes:
            self._reporter.note(kind, text)

    def draft(self, order: Order, content: Content) -> Manifest:
        """Return the manifest of a save without what the ranks report (``complete``)."""
        launch = self._launch
        return Manifest(
            job_id=launch.job_id,
            step=order.step,
            attempt=launch.attempt,
            parent=self.last,
            world_size=launch.world_size,
            created=datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            reason=order.reason,
            spec_digest=self._spec_digest,
            code_digest=launch.resolved.code_digest,
            data_digest=content.data_digest,
            total_steps=content.total_steps,
            replicas=content.replicas,
            bucket_layout=content.layout,
            hook=content.hook,
            environment=content.environment,
            finished=order.finished,
            files=[],
            tensors=[],
        )

    def _divergence(
        self,
        content: Content,
        writer_digests: Sequence[Sequence[str]],
        other_digests: Sequence[Mapping[str, Sequence[str]]],
    ) -> tuple[str, str | None] | None:
        """Return a message about the first tensor whose digests differ between ranks, and its name; None if none is known. The
        name is None for different sets of tensors."""
        other_tensors = f"{DIVERGED}: the ranks hold different sets of tensors; nothing was saved", None
        if len(writer_digests) != content.parts:
            return other_tensors
        plan = self._cuts.plan(content.snapshot.sizes(), content.parts or 1)
        if [len(digests) for digests in writer_digests] != [len(slices) for slices in plan][: content.parts]:
            return other_tensors
        if any(
            len(digests) != len(writer_digests[int(part)]) for one in other_digests for part, digests in one.items()
        ):
            return other_tensors
        found = first_difference(writer_digests, other_digests)
        if found is None:
            return None
        name, writer = plan[found.part][found.slice].name, found.part * self._exchange.world_size // content.parts
        text = f"{DIVERGED}: {name} of rank {found.ranks} differs from rank {writer}'s; nothing was saved"
        return text + self._hook_advice(), name

    def _hook_advice(self) -> str:
        """Return advice, to append to the message, for a custom hook; empty for other hooks."""
        hook = self._launch.spec.hook
        if not isinstance(hook, CustomSpec):
            return ""
        return (
            f". Hook {hook.hook} must return the same average on every rank (hook.replicas: equal): fix it, or set "
            "hook.replicas: rank if the ranks' parameters are meant to differ"
        )


class _Listings:
    """The lists of tensors in the ranks' reports; unchanged ones are not parsed again."""

    def __init__(self) -> None:
        self._cache: dict[int, tuple[bytes, list[TensorEntry]]] = {}

    def parse(self, texts: Sequence[bytes]) -> list[TensorEntry]:
        """Return the entries of all ranks' lists, in rank order."""
        for rank, text in enumerate(texts):
            if rank not in self._cache or self._cache[rank][0] != text:
                self._cache[rank] = text, parse_entries(text)
        return [entry for rank in range(len(texts)) for entry in self._cache[rank][1]]


def write_progress(directory: Path) -> tuple[int, int]:
    """Return two numbers that change while a save in ``directory`` makes progress. The first is the sizes of its files plus the
    bytes allocated for them. The second is the sum of their times of modification, which a writer also changes while it waits
    for a slow disk (``wait_for_writeback``). Both are 0 after an error."""
    try:
        found = [path.stat() for path in directory.iterdir()]
        return sum(one.st_size + 512 * one.st_blocks for one in found), sum(one.st_mtime_ns for one in found)
    except OSError:
        return 0, 0
