"""Rows as more jobs would leave them than a machine can run, copied from one job that was run: what hurts a layout."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy.orm import Session

from ratchet_contract.paths import JobPaths
from ratchet_contract.phases import AttemptPhase, Cause, JobPhase
from ratchet_service.db.engine import utc_now
from ratchet_service.db.models import (
    Attempt,
    AttemptNode,
    Checkpoint,
    Event,
    HookSample,
    Job,
    JobLabel,
    Metric,
    MetricSeries,
    Quota,
)

JOBS: Final = 130
RANKS: Final = 8
ATTEMPTS: Final = 26
STEPS: Final = 90_000
EVERY: Final = 500
"""Steps between checkpoints."""
_LARGE: Final = "job-zzzzzzzzzzzz"
_OWNER: Final = "medical-imaging-and-robotics"
_NAMES: Final = ("vit-large-imagenet21k-powersgd-rank-4-lr-3e-4-s", "wav2vec2-base-960h-finetune-", "unet3d-kits19-")
_LABELS: Final = (
    ("team", "vision"),
    ("sweep", "learning-rate-and-rank"),
    ("seed", "17"),
    ("dataset", "imagenet21k-winter"),
)
_METRICS: Final = ("loss", "validation/accuracy_top1", "learning_rate", "gradient_norm/encoder.layers.11.attention")
_PHASES: Final = {
    JobPhase.RUNNING: 6, JobPhase.QUEUED: 5, JobPhase.SUCCEEDED: 8, JobPhase.FAILED: 3, JobPhase.SUSPENDED: 1,
    JobPhase.CANCELLED: 1,
}  # fmt: skip
_CAUSES: Final = [
    cause
    for cause in Cause
    if cause not in (Cause.COMPLETED, Cause.API_CANCEL, Cause.USER_ERROR, Cause.TIMEOUT, Cause.UNKNOWN)
]


class Crowd:
    """``template``: the finished job of powerSGD, resumed at least once, whose spec, report and events are copied."""

    def __init__(self, session: Session, template: str) -> None:
        self._session = session
        self._random = random.Random(7)
        self._template = session.get_one(Job, template)
        self._report: dict[str, Any] = session.get_one(Attempt, (template, 2)).resume_report or {}
        self._events = session.query(Event).filter_by(job_id=template).all()
        samples = session.query(HookSample).filter_by(job_id=template).order_by(HookSample.step.desc())
        self._summary = samples.limit(1).one().summary
        self._now = utc_now()

    def add_jobs(self) -> list[str]:
        """130 jobs of seven owners in all phases, with long names and labels, and quotas; return the jobs' ids."""
        for owner in ("*", _OWNER, *(f"group-{n}" for n in range(6))):
            self._session.merge(Quota(owner=owner, queued=40, jobs=4, ranks=16, gpus=8, updated_at=self._now))
        return [self._small_job(n) for n in range(JOBS)]

    def _small_job(self, n: int) -> str:
        [phase] = self._random.choices([*_PHASES], [*_PHASES.values()])
        queued, running = phase is JobPhase.QUEUED, phase is JobPhase.RUNNING
        attempts = 0 if queued and n % 2 else 1 + n % 9
        waits = {"reason": "no-slot", "message": "needs 8 CPU slots, 3 of 64 are free; 7 jobs are ahead of it"}
        failed = {"reason": "exception", "message": "rank 3 raised an exception"}
        job = self._job(
            f"job-{n:012d}", _LABELS[: 1 + n % 4], name=f"{_NAMES[n % 3]}{n:03d}", phase=phase, attempt=attempts,
            owner=f"group-{n % 6}" if n % 5 else _OWNER, priority=n % 4 * 10, step=200 * attempts, total_steps=6000,
            created_at=self._ago(41), started_at=self._ago(40), ended_at=self._ago(2) if phase.terminal else None,
            **waits if queued else failed if phase is JobPhase.FAILED else {"reason": None, "message": None},
        )  # fmt: skip
        for number in range(1, attempts + 1):
            last = number == attempts
            cause = Cause.COMPLETED if last and phase is not JobPhase.FAILED else self._random.choice(_CAUSES)
            begin = 40 - 30 * number / (attempts + 1)
            self._attempt(
                job, number, None if last and running else cause, 200 * (number - 1), 200 * number, begin, 1.5, 4
            )
        if attempts:
            self._metric(job, "loss", 60, 20, attempts)
        return job

    def add_large_job(self) -> str:
        """A running job with 26 attempts of 8 ranks, 36 metrics and thousands of events; return its id."""
        step, begun = STEPS - 317, self._ago(29.9)
        more = [(f"hyperparameter-{n}", f"value-{n}") for n in range(6)]
        job = self._job(
            _LARGE, [*_LABELS, *more], name="vit-huge-imagenet21k-powersgd-rank-8-warmup-10000-cosine-ema", owner=_OWNER,
            phase=JobPhase.RUNNING, attempt=ATTEMPTS, step=step, total_steps=120_000, steps_per_second=3.2,
            committed_step=STEPS - EVERY, committed_attempt=ATTEMPTS, created_at=self._ago(30), started_at=begun,
            ended_at=None,
        )  # fmt: skip
        base = 0
        for number in range(1, ATTEMPTS + 1):
            newest = number == ATTEMPTS
            last = step if newest else number * STEPS // ATTEMPTS - self._random.randrange(900)
            cause = None if newest else _CAUSES[number % len(_CAUSES)]
            self._attempt(job, number, cause, base, last, 29.9 * (1 - (number - 1) / ATTEMPTS), 1.1, RANKS)
            first = base // EVERY * EVERY + EVERY
            for saved in range(first, last, EVERY):
                self._checkpoint(job, saved, number, {"step": base, "attempt": number - (saved == first)})
                base = saved
        for n in range(36):
            name = _METRICS[n] if n < len(_METRICS) else f"gradient_norm/encoder.layers.{n}.feed_forward"
            self._metric(job, name, 300, 300, None)
        self._hook(job)
        for n in range(3000):
            one, number = self._events[n % len(self._events)], 1 + n * ATTEMPTS // 3000
            row = Event(job_id=job, at=self._ago(30 - n / 100), type=one.type, attempt=number, data=one.data)
            row.message = one.message
            self._session.add(row)
        return job

    def _ago(self, hours: float) -> datetime:
        return self._now - timedelta(hours=hours)

    def _job(self, ident: str, labels: Sequence[tuple[str, str]], **columns: Any) -> str:
        kept = [c.name for c in Job.__table__.columns if not c.name.startswith("lease")]
        copied = {name: getattr(self._template, name) for name in kept}
        job = Job(**copied | {"id": ident, "updated_at": self._now, "paused_at": columns["ended_at"]} | columns)
        job.spec = job.spec | {"name": job.name, "trial": None}
        self._session.add(job)
        self._session.flush()
        for key, value in labels:
            self._session.add(JobLabel(job_id=ident, key=key, value=value, created_at=job.created_at))
        return ident

    def _attempt(
        self, job: str, number: int, cause: Cause | None, base: int, last: int, ago: float, hours: float, ranks: int
    ) -> None:
        """On two nodes. ``ago``: hours since its begin; ``hours``: its length."""
        lost = last % EVERY if cause is not None and cause.is_failure else 0
        redone = min(400, base) if number > 1 else 0
        known = dict.fromkeys(one["component"] for one in self._report["components"])
        parts = [{"component": c, "rank": r, "status": "exact", "reason": None} for c in known for r in range(ranks)]
        origin = {"step": base, "attempt": number - 1 if base else None, "digest": "d" * 64 if base else None}
        report: dict[str, Any] = {"components": parts, "base": origin, "verdict": "exact" if base else "fresh"}
        report |= {"world_size": ranks, "recorded_world_size": ranks}
        compared = {str(rank): [redone, redone] for rank in range(ranks)}
        begun = self._ago(ago)
        end = None if cause is None else begun + timedelta(hours=hours)
        phase = AttemptPhase.RUNNING if cause is None else AttemptPhase.ENDED
        row = Attempt(
            job_id=job, number=number, phase=phase, cause=cause, outcome=None if cause is None else cause.outcome,
            base_step=base, base_attempt=origin["attempt"], base_digest=origin["digest"], last_step=last,
            committed_step=max(base, last // EVERY * EVERY), steps_lost=None if cause is None else lost,
            resume_report=self._report | report, report_token_hash=f"{job}-{number}",
            redone={"world_size": ranks, "steps": redone, "reason": None, "first_difference": None, "ranks": compared},
            created_at=begun, begun_at=begun + timedelta(minutes=2), training_at=begun + timedelta(minutes=4),
            end_began_at=end and end - timedelta(minutes=1), ended_at=end,
        )  # fmt: skip
        if lost:
            row.rank, row.exit_code = 3, 1
            row.message = f"rank 3 ended: {cause}; see the last lines of its log"
        self._session.add(row)
        self._session.flush()
        for node in range(2):
            host = f"gpu-node-{(2 * number + node) % 12:02d}.cluster.internal"
            slots = [*range(ranks // 2)] if cause is None else []
            row_of_node = AttemptNode(job_id=job, attempt=number, node=node, host=host, cpu_slots=slots, phase=phase)
            self._session.add(row_of_node)

    def _checkpoint(self, job: str, step: int, attempt: int, parent: dict[str, Any]) -> None:
        kept = step % 5000 == 0 or step > STEPS - 12_000
        row = Checkpoint(
            job_id=job, step=step, attempt=attempt, digest="d" * 64, size=401_000_000, files=RANKS, seconds=1.4,
            stall=0.008, reason="schedule", parent=parent | {"digest": None}, pinned=step % 20_000 == 0,
            state="committed" if kept else "deleted", created_at=self._ago(30 * (1 - step / STEPS)),
        )  # fmt: skip
        self._session.add(row)

    def _metric(self, job: str, name: str, points: int, stride: int, attempt: int | None) -> None:
        scale, pace = self._random.uniform(0.5, 4), self._random.uniform(0.15, 0.5) * points
        for n in range(points):
            value = scale * (0.02 + math.exp(-n / pace)) * self._random.uniform(0.85, 1.15)
            row = Metric(job_id=job, name=name, step=n * stride, value=value, at=self._ago(29 * (1 - n / points)))
            row.attempt = attempt or 1 + n * ATTEMPTS // points
            self._session.add(row)
        newest = (points - 1) * stride
        series = MetricSeries(job_id=job, name=name, points=points, top=newest, newest=newest)
        series.attempt = attempt or ATTEMPTS
        self._session.add(series)

    def _hook(self, job: str) -> None:
        for rank in range(RANKS):
            for at in range(300):
                grown = (1 + 0.05 * rank) * (1 - math.exp(-at / 60)) * self._random.uniform(0.95, 1.05)
                summary = {
                    key: value * grown if isinstance(value, float) and "norm" in key else value
                    for key, value in self._summary.items()
                }
                summary |= {"rank": rank, "step": 300 * at, "iteration": 300 * at}
                row = HookSample(job_id=job, rank=rank, step=300 * at, summary=summary, at=self._ago(30 - at / 10))
                row.attempt = 1 + at * ATTEMPTS // 300
                self._session.add(row)


def add_files(paths: JobPaths) -> None:
    """The large job's log lines of its newest attempt, and 80 files with long names."""
    for rank in range(RANKS):
        log = paths.attempt(ATTEMPTS).log(rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"epoch {n // 400} step {n}: loss {2.3 * math.exp(-n / 900):.4f}" for n in range(4000)]
        lines[-3] = "WARNING " + "gradient norm far above the running mean, clipped to 1.0; " * 6
        log.write_text("\n".join(lines) + "\n")
    (paths.work_dir / "predictions").mkdir(parents=True, exist_ok=True)
    for n in range(80):
        name = f"evaluation-of-the-validation-set-epoch-{n:04d}-top1-and-top5-by-class.json"
        (paths.work_dir / name).write_text('{"top1": 0.71}\n' * (n + 1))
