"""What each kind of rank message changes. Nothing here raises for a strange message: a rank's spool must never get stuck on
one, so text is made storable and a message that cannot count becomes an event that says so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from ratchet_contract.errors import CheckpointError
from ratchet_contract.messages import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointFailed,
    CheckpointUploaded,
    HookState,
    Metrics,
    Note,
    Progress,
    Quarantined,
    RankMessage,
    Resumed,
    Started,
    Training,
)
from ratchet_contract.paths import JobPaths, checkpoint_dir_name
from ratchet_contract.phases import Event
from ratchet_service import transitions
from ratchet_service.clock import now_in
from ratchet_service.models import Attempt, Checkpoint, HookSample, Job, Metric
from ratchet_store.commit import read_manifest

MAX_NUMBER: Final = 2**63 - 1
_CHUNK: Final = 500
_MAX_DEPTH: Final = 64
"""Of a message's data: what is stored must be readable again, by every reader's limit of recursion."""
MAX_SAMPLES: Final = 2000
UNMANAGED: Final = "unmanaged"


def saved_iteration(job: JobPaths, message: CheckpointCommitted) -> int | None:
    """The hook's iteration as rank 0 saved it; None where the manifest cannot be read (any more)."""
    try:
        manifest = read_manifest(job.checkpoint(message.step, message.epoch))
    except (CheckpointError, ValueError, OverflowError):
        return None
    return next((s.iteration for s in manifest.hook_summaries if s.rank == 0), None)


class Effects:
    """Applies messages of one attempt, in order, within the caller's transaction; ``finish`` writes what was gathered."""

    def __init__(self, session: Session, job: Job, attempt: Attempt, iterations: dict[tuple[int, int], int]) -> None:
        self._session, self._job, self._attempt, self._iterations = session, job, attempt, iterations
        self._metrics: dict[tuple[str, int], dict[str, Any]] = {}
        self._samples: dict[tuple[int, int], dict[str, Any]] = {}
        self._now = now_in(session)

    @property
    def _newest(self) -> bool:
        return self._attempt.number == self._job.epoch

    def apply(self, rank: int, message: RankMessage) -> None:
        """``rank`` is the batch's: a message cannot speak for another rank."""
        if not all(number is None or 0 <= number <= MAX_NUMBER for number in _numbers(message)):
            self._event("message-dropped", f"rank {rank}: a {message.kind} message with an impossible number", {})
            return
        match message:
            case Started():
                self._started(rank, message)
            case Training():
                self._training(message)
            case Resumed():
                self._resumed(message)
            case Metrics():
                self._add_metrics(message)
            case Progress():
                self._progress(message)
            case HookState():
                self._hook(rank, message)
            case CheckpointCommitted():
                self._committed(message)
            case CheckpointUploaded():
                self._uploaded(message)
            case CheckpointFailed():
                text = f"the checkpoint of step {message.step} failed: {storable(message.error)}"
                self._event("checkpoint-failed", text, {"step": message.step})
            case CheckpointDeleted():
                self._set_state(message.step, message.epoch, "deleted")
            case Quarantined():
                self._quarantined(message)
            case Note():
                data = {"rank": rank, "data": storable_json(message.data)}
                self._event(f"note.{storable(message.type)}"[:64], storable(message.message), data)

    def finish(self) -> None:
        """Write gathered series; later epochs replace earlier ones, never the other way round."""
        self._session.flush()
        self._upsert(Metric, ["job_id", "name", "step"], self._metrics.values())
        self._upsert(HookSample, ["job_id", "rank", "step"], self._samples.values())
        for rank in {rank for rank, _ in self._samples}:
            thin_samples(self._session, self._job.id, rank)
        if self._newest:
            self._job.updated_at = self._now
        self._session.flush()

    def _event(self, kind: str, message: str, data: dict[str, Any]) -> None:
        transitions.add_event(self._session, self._job.id, kind, message, epoch=self._attempt.number, data=data)

    def _started(self, rank: int, message: Started) -> None:
        data = {"rank": rank, "pid": message.pid, "host": storable(message.host), "device": storable(message.device)}
        data["torch"] = storable(message.torch)
        self._event("rank-started", f"rank {rank} started on {data['host']} ({data['device']})", data)

    def _training(self, message: Training) -> None:
        attempt, job, base = self._attempt, self._job, message.base
        attempt.base_step, attempt.base_epoch = base.step, base.epoch
        attempt.base_digest = None if base.digest is None else storable(base.digest)[:64]
        attempt.training_at = when(message.at, self._now)
        attempt.last_step = max(attempt.last_step, base.step)
        if not self._newest or not job.phase.active:
            return
        forked = job.fork_source is not None and base.digest == job.fork_source["digest"]
        job.step = job.committed_step = base.step
        job.committed_epoch = None if forked else base.epoch
        job.resume_from = job.steps_per_second = None
        if message.total_steps is not None:
            job.total_steps = message.total_steps
        data = {"base_step": base.step, "base_epoch": base.epoch}
        transitions.apply(
            self._session, job.id, Event.TRAINING, expected_epoch=attempt.number, data=data,
            reason=job.reason, message=job.message,
        )  # fmt: skip

    def _resumed(self, message: Resumed) -> None:
        report = storable_json(message.model_dump(mode="json")["report"])
        self._attempt.resume_report = report
        base, verdict = message.report.base, message.report.verdict
        text = "started from scratch" if base.epoch is None else f"resumed from step {base.step}"
        if verdict == UNMANAGED:
            text = "started from its first line"
        self._event("resumed", f"{text}: {verdict}", {"verdict": verdict, "step": base.step})
        if verdict == UNMANAGED:
            self._unmanaged(message)

    def _unmanaged(self, message: Resumed) -> None:
        """A script that keeps its own state runs. It has no base and no steps that could be told: only the phase moves."""
        if self._attempt.training_at is None:
            self._attempt.training_at = when(message.at, self._now)
        if self._newest and self._job.phase.active:
            transitions.apply(
                self._session, self._job.id, Event.TRAINING, expected_epoch=self._attempt.number,
                data={"verdict": UNMANAGED}, reason=self._job.reason, message=self._job.message,
            )  # fmt: skip

    def _add_metrics(self, message: Metrics) -> None:
        at = when(message.at, self._now)
        for raw, value in message.values.items():
            name = storable(raw)[:200]
            self._metrics[name, message.step] = {
                "job_id": self._job.id, "name": name, "step": message.step, "epoch": self._attempt.number,
                "value": None if math.isnan(value) else value, "at": at,
            }  # fmt: skip

    def _progress(self, message: Progress) -> None:
        self._attempt.last_step = max(self._attempt.last_step, message.step)
        if not self._newest:
            return
        self._job.step = message.step
        if message.total_steps is not None:
            self._job.total_steps = message.total_steps
        if message.data_epoch is not None:
            self._job.data_epoch = message.data_epoch
        rate = message.steps_per_second
        if rate is not None and 0 <= rate < math.inf:  # also false for NaN
            self._job.steps_per_second = rate

    def _hook(self, rank: int, message: HookState) -> None:
        summary = storable_json(message.model_dump(mode="json")["summary"]) | {"rank": rank}
        step = message.summary.step
        self._samples[rank, step] = {
            "job_id": self._job.id, "rank": rank, "step": step, "epoch": self._attempt.number, "summary": summary,
            "at": when(message.at, self._now),
        }  # fmt: skip

    def _committed(self, message: CheckpointCommitted) -> None:
        name = checkpoint_dir_name(message.step, message.epoch)
        if message.epoch != self._attempt.number:
            self._event("checkpoint-ignored", f"{name} is not of attempt {self._attempt.number}", {"checkpoint": name})
            return
        row = self._session.get(Checkpoint, (self._job.id, message.step, message.epoch))
        if row is None:
            row = Checkpoint(job_id=self._job.id, step=message.step, epoch=message.epoch, state="committed")
            row.created_at = when(message.at, self._now)
            self._session.add(row)
        elif row.digest != storable(message.digest)[:64]:
            text = f"{name} is recorded with digest {row.digest}, the report says {storable(message.digest)[:64]}"
            self._event("checkpoint-ignored", text, {"checkpoint": name})
            return
        ended = row.finished is False and message.finished  # None: a new row
        row.digest, row.size, row.files = storable(message.digest)[:64], message.size, message.files
        row.seconds = message.seconds if math.isfinite(message.seconds) else None
        stall = message.stall
        if stall is not None and math.isfinite(stall):  # not told again with what showed behind the commit
            row.stall = stall
        row.reason, row.finished = message.reason, message.finished
        row.parent = storable_json(message.parent.model_dump(mode="json"))
        row.hook_iteration = self._iterations.get((message.step, message.epoch), row.hook_iteration)
        attempt = self._attempt
        attempt.committed_step = max(attempt.committed_step or 0, message.step)
        attempt.last_step = max(attempt.last_step, message.step)
        if self._newest and message.step >= self._job.committed_step:
            self._job.committed_step, self._job.committed_epoch = message.step, message.epoch
        self._session.flush()
        data = {"checkpoint": name, "step": message.step, "reason": message.reason, "size": message.size}
        text = "is the job's last" if ended else f"committed ({message.reason})"
        self._event("checkpoint", f"checkpoint {name} {text}", data)

    def _uploaded(self, message: CheckpointUploaded) -> None:
        """Its copy is whole. One that the row says was deleted or set aside is here again: fetched, since its disk had lost or
        damaged it."""
        name = checkpoint_dir_name(message.step, message.epoch)
        row = self._session.get(Checkpoint, (self._job.id, message.step, message.epoch))
        if row is None:
            return  # its commit has not been reported yet; agents say this once more
        if row.digest != storable(message.digest)[:64]:
            text = f"{name} was copied to {storable(message.uri)}, but is recorded with digest {row.digest}"
            self._event("checkpoint-ignored", text, {"checkpoint": name})
            return
        if row.state == "quarantined":  # what was found was found in what lay here before
            row.verified_at = row.verification = row.verification_error = None
        row.state = "committed"
        if row.uploaded_at is None:
            row.uri, row.uploaded_at = storable(message.uri)[:2000], when(message.at, self._now)
            seconds = message.seconds if math.isfinite(message.seconds) else None
            data = {"checkpoint": name, "uri": row.uri, "nbytes": message.nbytes, "seconds": seconds}
            self._event("checkpoint-uploaded", f"checkpoint {name} is copied to {row.uri}", data)

    def _quarantined(self, message: Quarantined) -> None:
        self._set_state(message.step, message.epoch, "quarantined")
        name = checkpoint_dir_name(message.step, message.epoch)
        text = f"checkpoint {name} is damaged and was set aside: {storable(message.error)}"
        self._event("checkpoint-quarantined", text, {"checkpoint": name})

    def _set_state(self, step: int, epoch: int, state: str) -> None:
        row = self._session.get(Checkpoint, (self._job.id, step, epoch))
        if row is not None:
            row.state = state

    def _upsert(self, table: Any, keys: list[str], values: Iterable[dict[str, Any]]) -> None:
        rows = list(values)
        insert = postgresql.insert if self._session.get_bind().dialect.name == "postgresql" else sqlite.insert
        for begin in range(0, len(rows), _CHUNK):
            statement = insert(table).values(rows[begin : begin + _CHUNK])
            new = {c: statement.excluded[c] for c in rows[0] if c not in keys}
            self._session.execute(
                statement.on_conflict_do_update(
                    index_elements=keys, set_=new, where=table.epoch <= statement.excluded.epoch
                )
            )


def _numbers(message: RankMessage) -> Iterator[int | None]:
    """Those that end up in 64-bit columns."""
    for name in ("step", "epoch", "total_steps", "data_epoch", "size", "files", "nbytes"):
        yield getattr(message, name, 0)
    if isinstance(message, HookState):
        yield from (message.summary.step, message.summary.iteration)
    if isinstance(message, Training):
        yield from (message.base.step, message.base.epoch)


def thin_samples(session: Session, job_id: str, rank: int, most: int = MAX_SAMPLES) -> None:
    """Beyond ``most`` summaries of a rank, every second one goes, the newest stays: the history keeps its whole length."""
    mine = (HookSample.job_id == job_id) & (HookSample.rank == rank)
    if (session.scalar(sa.select(sa.func.count()).select_from(HookSample).where(mine)) or 0) <= most:
        return
    order = sa.func.row_number().over(order_by=HookSample.step.desc()).label("row")
    rows = sa.select(HookSample.step, order).where(mine).subquery()
    session.execute(
        sa.delete(HookSample).where(mine, HookSample.step.in_(sa.select(rows.c.step).where(rows.c.row % 2 == 0)))
    )


def storable(text: str) -> str:
    """Text without what PostgreSQL or UTF-8 refuse: NUL characters and halves of surrogate pairs."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def storable_json(value: Any, depth: int = 0) -> Any:
    """The same for every text in JSON data; numbers that are no JSON become their names, what is nested too deeply "..."."""
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {storable(str(key)): storable_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [storable_json(item, depth + 1) for item in value]
    return value


def when(text: str, fallback: datetime) -> datetime:
    """A worker's time; its clock is not ours to judge, but a text that is no time gets ``fallback``."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return fallback
    return at if at.tzinfo is not None else fallback
