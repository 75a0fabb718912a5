"""Rank 0's part of a save, in the saving thread: all reports in, replicas equal, manifest committed, older ones deleted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ratchet_contract.errors import RatchetError
from ratchet_contract.manifest import HOOK_SUMMARY, FileEntry, Manifest, TensorEntry, parse_entries
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import JobPaths
from ratchet_contract.resume import Base
from ratchet_hooks.specs import CustomSpec
from ratchet_store.commit import ManifestWriter, mark_finished
from ratchet_store.files import in_memory
from ratchet_store.keeper import Keeper
from ratchet_worker import fingerprint
from ratchet_worker.content import Content
from ratchet_worker.exchange import Exchange, PeerTimeout
from ratchet_worker.reporter import Reason, Reporter


@dataclass(frozen=True)
class Order:
    """What is saved, as all ranks know it. ``begun``: monotonic seconds. ``beside``: it is copied and compared while the next
    step is computed."""

    number: int
    step: int
    reason: Reason
    finished: bool
    begun: float
    beside: bool = False

    @property
    def name(self) -> str:
        return f"save/{self.number}"


_BESIDE: Final = (
    "{}. Code beside optimizer.step() has changed it while it was copied beside the next step, or the replicas have diverged: "
    "the next save, which is copied before a step begins, tells which"
)
_PAUSE: Final = 0.002
"""Seconds between two looks at the reports that may be due, at most: one rank alone looks, and a save is not safe before it has
seen them."""
DIVERGED: Final = "replicas have diverged"
Verdict = dict[str, Any]
"""``error`` None: committed, ``base`` is the new checkpoint. ``parted``: only some ranks have ended. ``early``: a tensor may have
changed before it was copied; all ranks copy before each step from now on. ``diverged``: the first tensor that the ranks have
otherwise (null: they have other tensors), of which the likely cause is not told yet. ``failures``: in a row."""


class Committer:
    """``last``: the newest checkpoint of this attempt, or what it started from."""

    def __init__(self, launch: LaunchFile, exchange: Exchange, reporter: Reporter, base: Base) -> None:
        self._launch, self._exchange, self._reporter = launch, exchange, reporter
        self._job = JobPaths(Path(launch.job_root))
        self._fence = self._job.attempt(launch.epoch).fence_file
        self._spec_digest, self._patience = launch.spec.digest(), launch.deadlines.step
        self.last, self._cuts = base, fingerprint.Cuts()
        self._listings, self._writer = _Listings(), ManifestWriter()
        protected = [(base.step, base.epoch)] if base.epoch is not None else []
        self._keeper = Keeper(self._job.checkpoints, launch.spec.checkpoint, launch.epoch, protected)
        self._committed: tuple[Manifest, float] | None = None  # the newest of this attempt, and its seconds

    def decide(self, order: Order, mine: Content | None, stall: float) -> Verdict:
        """Wait for all ranks' reports, as long as something is still being written; commit, or say what went wrong."""
        directory = self._job.checkpoint(order.step, self._launch.epoch)
        try:
            told = self._exchange.collect_beside(
                order.name,
                timeout=self._patience,
                progress=lambda: written(directory),
                pause=_PAUSE,
                recurs=True,
            )
        except PeerTimeout as error:
            return {"error": str(error)}
        reports = [report for report, _ in told]
        errors = [r["error"] for r in reports if r["error"] is not None]
        if errors or mine is None:
            return {"error": "; ".join(errors), "early": any(r.get("early") for r in reports)}
        ended = [rank for rank, report in enumerate(reports) if report["finished"]]
        if ended and len(ended) < len(reports):
            text = f"rank {ended} ended after step {order.step}, others go on: leave the loop on all ranks in the same step"
            return {"error": text, "parted": True}
        if len(set(steps := [report["step"] for report in reports])) > 1:
            text = f"the ranks save other steps, {steps} in rank order: all ranks do the same steps, and ask for the same saves"
            return {"error": text, "parted": True}
        own = [digests for report in reports for digests in report["parts"]]
        diverged = self._divergence(mine, own, [r["seen"] for r in reports])
        if diverged is not None and order.beside:
            return {"error": _BESIDE.format(diverged[0].removeprefix(f"{DIVERGED}: ")), "early": True}
        if diverged is not None:
            text, name = diverged
            custom = isinstance(self._launch.spec.hook, CustomSpec)
            return {"error": text, "early": True, **({} if custom else {"diverged": name})}
        try:
            tensors = self._listings.of([listing for _, listing in told])
            digests = [fingerprint.part_digest(slices) for slices in own]
            if self._fence.exists():  # the next attempt may have chosen its base already
                return {"error": "the service has declared this attempt over: its checkpoints count no more"}
            self._exchange.hold()
            manifest = self._writer.commit(directory, self._manifest(order, mine, reports, digests, tensors))
        except (RatchetError, OSError) as error:
            return {"error": str(error)}
        self.last = manifest.base
        self._committed = manifest, time.monotonic() - order.begun
        self._reporter.committed(*self._committed, stall)
        return {"error": None, "base": manifest.base.model_dump()}

    def finish(self) -> None:
        """The newest checkpoint of this attempt was the job's last, which only shows now: a resume from it has nothing left to
        do. Without effect where that is known. Raises ``CheckpointError``."""
        if self._committed is None or self._committed[0].finished:
            return
        manifest, seconds = self._committed
        self._exchange.hold()
        mark_finished(self._job.checkpoint(manifest.step, manifest.epoch))
        self._committed = manifest.model_copy(update={"finished": True}), seconds
        self._reporter.committed(*self._committed)

    def metric(self, step: int, values: Mapping[str, float]) -> None:
        """What was logged at ``step``. Any thread; waits for no disk."""
        self._keeper.metric(step, values)

    def retain(self) -> None:
        """Behind a commit: delete what nothing keeps any more. A failure to delete costs disk space, not the checkpoint."""
        if self._committed is None:
            return
        deleted, notes = self._keeper.committed(self._committed[0])
        for step, epoch in deleted:
            self._reporter.deleted(step, epoch)
        for kind, text in notes:
            self._reporter.note(kind, text)

    def _manifest(
        self,
        order: Order,
        mine: Content,
        reports: Sequence[Mapping[str, Any]],
        digests: list[str],
        tensors: list[TensorEntry],
    ) -> Manifest:
        launch = self._launch
        return Manifest(
            job_id=launch.job_id,
            step=order.step,
            epoch=launch.epoch,
            parent=self.last,
            world_size=launch.world_size,
            created=datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            reason=order.reason,
            spec_digest=self._spec_digest,
            code_digest=launch.resolved.code_digest,
            data_digest=mine.data_digest,
            total_steps=mine.total_steps,
            replicas=mine.replicas,
            shared_digests=digests,
            bucket_layout=mine.layout,
            hook=mine.hook,
            hook_summaries=[HOOK_SUMMARY.validate_json(r["summary"]) for r in reports],
            environment=mine.environment,
            finished=order.finished,
            files=[FileEntry.model_validate(r["file"]) for r in reports],
            tensors=tensors,
        )

    def _divergence(
        self, mine: Content, own: Sequence[Sequence[str]], seen: Sequence[Mapping[str, Sequence[str]]]
    ) -> tuple[str, str | None] | None:
        """The first tensor that differs, with the ranks that do not have what the rank has that was to write it; and its name."""
        other_tensors = f"{DIVERGED}: the ranks hold different sets of tensors; nothing was saved", None
        if len(own) != mine.parts:
            return other_tensors
        plan = self._cuts.of(mine.snapshot.sizes(), mine.parts or 1)
        if [len(digests) for digests in own] != [len(slices) for slices in plan][: mine.parts]:
            return other_tensors
        if any(len(digests) != len(own[int(part)]) for one in seen for part, digests in one.items()):
            return other_tensors
        found = fingerprint.first_difference(own, seen)
        if found is None:
            return None
        name, writer = plan[found.part][found.slice].name, found.part * self._exchange.world_size // mine.parts
        text = f"{DIVERGED}: {name} of rank {found.ranks} differs from rank {writer}'s; nothing was saved"
        return text + self._advice(), name

    def _advice(self) -> str:
        hook = self._launch.spec.hook
        if not isinstance(hook, CustomSpec):
            return ""
        return (
            f". Hook {hook.hook} is to give every rank the same average (hook.replicas: equal): mend it, or set hook.replicas: "
            "rank if the ranks' parameters are meant to differ"
        )


class _Listings:
    """The lists of tensors that the ranks tell. Each is parsed when it is another than in the rank's last report."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, list[TensorEntry]]] = {}

    def of(self, texts: Sequence[bytes]) -> list[TensorEntry]:
        """All of them in rank order; what has not changed is the very objects of the last time."""
        for rank, text in enumerate(texts):
            if rank not in self._known or self._known[rank][0] != text:
                self._known[rank] = text, parse_entries(text)
        return [entry for rank in range(len(texts)) for entry in self._known[rank][1]]


def written(directory: Path) -> tuple[int, int]:
    """Bytes in a directory's files now, twice those that have a place on the disk, and pages of them that the disk has yet to
    write: while a save makes progress, the one grows, also where a block is written behind which another lies already, or the
    other shrinks."""
    try:
        paths = list(directory.iterdir())
        found = [path.stat() for path in paths]
        return sum(one.st_size + 512 * one.st_blocks for one in found), sum(map(in_memory, paths))
    except OSError:
        return 0, 0
