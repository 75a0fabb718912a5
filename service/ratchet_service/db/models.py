"""The database's tables. Only ``transitions`` changes a job's phase. JSON columns hold plain JSON data, never NaN."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from ratchet_contract.api.roles import LOCAL_OWNER, Role
from ratchet_contract.paths import checkpoint_dir_name
from ratchet_contract.phases import AttemptPhase, Cause, Desired, JobPhase, Outcome
from ratchet_service.db.types import BigId, Json, UtcDateTime, enum_type

JOB_ID_LENGTH = 16  # "job-" and 12 base32 characters


class Base(DeclarativeBase):
    """Base class of all tables. It names every constraint, so that migrations can refer to it, and maps Python types to column
    types."""

    metadata = sa.MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime(),
        dict[str, Any]: Json,
        list[dict[str, Any]]: Json,
        int: sa.BigInteger(),
        JobPhase: enum_type(JobPhase),
        Desired: enum_type(Desired),
        AttemptPhase: enum_type(AttemptPhase),
        Outcome: enum_type(Outcome),
        Role: enum_type(Role),
        Cause: sa.Enum(Cause, native_enum=False, length=32, values_callable=lambda e: [m.value for m in e]),
    }


def _job_id() -> Mapped[str]:
    """Return the column ``job_id``, a part of the table's primary key; the row is deleted with its job."""
    return mapped_column(sa.String(JOB_ID_LENGTH), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)


class Job(Base):
    """One job: its spec, phase, desired state, progress and lease. ``version``: for the ETag; increased by some changes, such as
    those of the phase, but not by progress."""

    __tablename__ = "jobs"
    __table_args__ = (
        sa.Index("ix_jobs_phase_not_before", "phase", "not_before"),
        sa.Index("ix_jobs_created_at_id", "created_at", "id"),
        sa.Index("ix_jobs_name_id", "name", "id"),
        sa.Index("ix_jobs_priority_id", "priority", "id"),
        # for LIKE with a prefix, which PostgreSQL's other indexes do not serve
        *(
            sa.Index(f"ix_jobs_{column}_prefix", column, postgresql_ops={column: "text_pattern_ops"}).ddl_if(
                "postgresql"
            )
            for column in ("name", "id")
        ),
        sa.Index(
            "ix_jobs_ttl", "ttl", sqlite_where=sa.text("ttl IS NOT NULL"), postgresql_where=sa.text("ttl IS NOT NULL")
        ),
        sa.Index(
            "ix_jobs_preempting_since",
            "preempting_since",
            sqlite_where=sa.text("preempting_since IS NOT NULL"),
            postgresql_where=sa.text("preempting_since IS NOT NULL"),
        ),
        sa.Index(
            "ix_jobs_queued",
            "phase",
            "reason",
            "not_before",
            sqlite_where=sa.text("phase = 'QUEUED'"),
            postgresql_where=sa.text("phase = 'QUEUED'"),
        ),
        sa.Index("ix_jobs_phase_owner_priority_created_at_id", "phase", "owner", "priority", "created_at", "id"),
        *(
            sa.Index(f"ix_jobs_{column}_created_at_id", column, "created_at", "id")
            for column in ("phase", "name", "owner")
        ),
        # each report and each renewed lease changes rows of running jobs: without room in its page, a row moves, with 14 indexes
        {"postgresql_with": {"fillfactor": 50}},
    )

    id: Mapped[str] = mapped_column(sa.String(JOB_ID_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(63))
    owner: Mapped[str] = mapped_column(sa.String(63), default=LOCAL_OWNER, server_default=LOCAL_OWNER)
    phase: Mapped[JobPhase] = mapped_column(default=JobPhase.QUEUED)
    desired: Mapped[Desired] = mapped_column(default=Desired.RUN)
    desired_cause: Mapped[Cause | None]  # the cause a stop will have; None while desired is run
    desired_at: Mapped[datetime | None]  # when the first stop request was made, even if another has replaced it
    reason: Mapped[str | None] = mapped_column(sa.String(64))
    message: Mapped[str | None] = mapped_column(sa.Text)
    spec: Mapped[dict[str, Any]]
    resolved: Mapped[dict[str, Any]]
    warnings: Mapped[list[dict[str, Any]]] = mapped_column(default=list)
    spec_digest: Mapped[str] = mapped_column(sa.String(64))
    priority: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column(default=1)

    attempt: Mapped[int] = mapped_column(default=0)  # number of the newest attempt
    step: Mapped[int] = mapped_column(default=0)
    total_steps: Mapped[int | None]
    data_epoch: Mapped[int | None]
    steps_per_second: Mapped[float | None] = mapped_column(sa.Double())  # newest measurement of the newest attempt
    committed_step: Mapped[int] = mapped_column(
        default=0
    )  # newest committed step of the lineage (fork source included)
    committed_attempt: Mapped[int | None]  # attempt of that checkpoint; None: from scratch, or the fork source's
    checkpoint_request: Mapped[int] = mapped_column(default=0)  # grows by one for each "save now"

    preemptions: Mapped[int] = mapped_column(default=0)
    failures: Mapped[int] = mapped_column(default=0)
    attempts_without_progress: Mapped[int] = mapped_column(default=0)  # attempts in a row that committed no new step
    retries: Mapped[int] = mapped_column(default=0, server_default="0")  # in a row: ``decision.Counters``
    not_before: Mapped[datetime | None]
    preempting_since: Mapped[datetime | None]  # another job was stopped for this one, which has not started yet
    running_seconds: Mapped[float] = mapped_column(sa.Double(), default=0.0)  # of ended attempts, for policy.timeout

    lease_owner: Mapped[str | None] = mapped_column(sa.String(128))
    lease_token: Mapped[str | None] = mapped_column(sa.String(64))
    lease_expires_at: Mapped[datetime | None]

    ttl: Mapped[float | None] = mapped_column(sa.Double())  # seconds after the end
    forked_from: Mapped[str | None] = mapped_column(sa.String(96))  # "<job id>/<checkpoint id>"
    fork_source: Mapped[dict[str, Any] | None]  # messages.ForkSource
    resume_from: Mapped[
        dict[str, Any] | None
    ]  # {"step": int, "attempt": int}: requested explicitly, until an attempt uses it

    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    started_at: Mapped[datetime | None]  # first attempt launched
    ended_at: Mapped[datetime | None]
    paused_at: Mapped[datetime | None]  # when it was suspended or ended; None while it is meant to run
    paused_seconds: Mapped[float] = mapped_column(sa.Double(), default=0.0, server_default="0")  # of earlier pauses


class JobLabel(Base):
    """One label of a job."""

    __tablename__ = "job_labels"
    __table_args__ = (sa.Index("ix_job_labels_key_value_created_at", "key", "value", "created_at", "job_id"),)

    job_id: Mapped[str] = _job_id()
    key: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    value: Mapped[str] = mapped_column(sa.String(255))
    created_at: Mapped[datetime] = mapped_column(server_default=sa.func.now())  # the job's: lists need one index


class Attempt(Base):
    """One launch of a job's group of agents. ``base_step``: step of the checkpoint that the ranks started from; 0: from scratch.
    None: not known, such as before training begins, or for a script without a Session."""

    __tablename__ = "attempts"
    __table_args__ = (
        sa.Index("ix_attempts_phase", "phase"),
        sa.Index("ix_attempts_ended_at", "ended_at", "cause", "job_id", "number"),
    )

    job_id: Mapped[str] = _job_id()
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    phase: Mapped[AttemptPhase] = mapped_column(default=AttemptPhase.LAUNCHING)
    outcome: Mapped[Outcome | None]
    cause: Mapped[Cause | None]
    node: Mapped[int | None]  # that caused the end
    rank: Mapped[int | None]
    exit_code: Mapped[int | None]
    message: Mapped[str | None] = mapped_column(sa.Text)
    base_step: Mapped[int | None]
    base_attempt: Mapped[int | None]
    base_digest: Mapped[str | None] = mapped_column(sa.String(64))
    last_step: Mapped[int] = mapped_column(default=0)
    committed_step: Mapped[int | None]  # newest step that this attempt committed
    steps_lost: Mapped[int | None]
    resume_report: Mapped[dict[str, Any] | None]
    redone: Mapped[dict[str, Any] | None]  # what its ranks reported on redone steps: ``redone_steps``
    metrics_differ: Mapped[dict[str, Any] | None]  # {name: first step}: metrics that differ at redone steps
    report_token_hash: Mapped[str] = mapped_column(sa.String(64))  # hex SHA-256
    stragglers: Mapped[dict[str, Any] | None]  # rank -> data of its event
    launch: Mapped[dict[str, Any]] = mapped_column(default=dict)  # the launcher's plan
    results: Mapped[dict[str, Any]] = mapped_column(default=dict)  # {node: AttemptResult}, as reported
    created_at: Mapped[datetime]
    begun_at: Mapped[datetime | None]  # first agent seen; until then it may have waited in an engine's queue
    deadlines: Mapped[dict[str, Any] | None]  # run time and elapsed deadlines: ``persisted_deadlines``
    training_at: Mapped[datetime | None]
    stop_at: Mapped[datetime | None]  # when its first agent received the stop request
    end_began_at: Mapped[datetime | None]  # when what ended its ranks began; for a hang, their last progress
    ended_at: Mapped[datetime | None]
    pace: Mapped[dict[str, Any] | None]  # timing.Pace measured in this and earlier attempts
    notes_reported: Mapped[int] = mapped_column(default=0, server_default="0")  # including those left out
    metric_values_refused: Mapped[int] = mapped_column(default=0, server_default="0")  # beyond the limit of series
    late_requests: Mapped[int] = mapped_column(default=0, server_default="0")  # requests received after it was over


class AttemptNode(Base):
    """One node of an attempt. ``acked``: rank (as text) -> the highest sequence number of the rank's stored messages."""

    __tablename__ = "attempt_nodes"
    __table_args__ = (
        sa.ForeignKeyConstraint(["job_id", "attempt"], ["attempts.job_id", "attempts.number"], ondelete="CASCADE"),
    )

    job_id: Mapped[str] = mapped_column(sa.String(JOB_ID_LENGTH), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    node: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    host: Mapped[str | None] = mapped_column(sa.String(255))
    pid: Mapped[int | None]
    start_time: Mapped[int | None]  # field 22 of /proc/<pid>/stat
    gpus: Mapped[list[int]] = mapped_column(Json, default=list)
    cpu_slots: Mapped[list[int]] = mapped_column(Json, default=list)
    phase: Mapped[AttemptPhase] = mapped_column(default=AttemptPhase.LAUNCHING)
    acked: Mapped[dict[str, int]] = mapped_column(Json, default=dict)
    times: Mapped[dict[str, list[list[float]]] | None] = mapped_column(Json)  # ``stragglers.Times`` of its ranks
    reported_at: Mapped[datetime | None]  # last report that stored anything
    address: Mapped[str | None] = mapped_column(sa.String(255))  # host:port at which the other nodes reach it


class Checkpoint(Base):
    """One checkpoint of a job, by step and attempt. The row stays when only the files are deleted."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        sa.Index(
            "ix_checkpoints_removing_since",
            "removing_since",
            sqlite_where=sa.text("removing_since IS NOT NULL"),
            postgresql_where=sa.text("removing_since IS NOT NULL"),
        ),
    )

    job_id: Mapped[str] = _job_id()
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(sa.String(64))
    parent: Mapped[dict[str, Any] | None]  # resume_report.Base
    size: Mapped[int]
    files: Mapped[int]
    seconds: Mapped[float | None] = mapped_column(sa.Double())
    stall: Mapped[float | None] = mapped_column(sa.Double())  # part of ``seconds`` that rank 0 was blocked
    reason: Mapped[str] = mapped_column(sa.String(16))
    finished: Mapped[bool] = mapped_column(default=False)
    state: Mapped[str] = mapped_column(sa.String(16), default="committed")  # committed, quarantined, deleted
    removing_since: Mapped[datetime | None]  # deleted, but its files may still exist: ``checkpoints.removal``
    adopted: Mapped[bool] = mapped_column(default=False)
    pinned: Mapped[bool] = mapped_column(default=False)
    verified_at: Mapped[datetime | None]
    verification: Mapped[str | None] = mapped_column(sa.String(16))  # ok, damaged
    verification_error: Mapped[str | None] = mapped_column(sa.Text)
    hook_iteration: Mapped[int | None]
    uri: Mapped[str | None] = mapped_column(sa.String(2000))  # of its copy in an object store
    uploaded_at: Mapped[datetime | None]  # when that copy was complete
    created_at: Mapped[datetime]

    @property
    def name(self) -> str:
        """The checkpoint's id in the API, and the name of its directory among the job's checkpoints."""
        return checkpoint_dir_name(self.step, self.attempt)


class Event(Base):
    """One entry of a job's history. Rows are never changed. Their ids grow in commit order within a job."""

    __tablename__ = "events"
    __table_args__ = (sa.Index("ix_events_job_id_id", "job_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(sa.String(JOB_ID_LENGTH), sa.ForeignKey("jobs.id", ondelete="CASCADE"))
    at: Mapped[datetime]
    type: Mapped[str] = mapped_column(sa.String(64))
    attempt: Mapped[int | None]
    message: Mapped[str] = mapped_column(sa.Text)
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)


class IdempotencyKey(Base):
    """An idempotency key that a request has used. ``status`` is None until an answer is stored."""

    __tablename__ = "idempotency_keys"
    __table_args__ = (sa.Index("ix_idempotency_keys_created_at", "created_at"),)

    scope: Mapped[str] = mapped_column(sa.String(64), primary_key=True)  # hex SHA-256 of caller, method and path
    key: Mapped[str] = mapped_column(sa.String(255), primary_key=True)
    body_hash: Mapped[str] = mapped_column(sa.String(64))
    token: Mapped[str] = mapped_column(sa.String(32))  # of the running request
    status: Mapped[int | None]
    headers: Mapped[dict[str, Any]] = mapped_column(default=dict)
    body: Mapped[str | None] = mapped_column(sa.Text)
    created_at: Mapped[datetime]


class MetricSeries(Base):
    """One metric of a job, and the grid of its stored points: the steps with ``step % stride == phase``. Other points may be
    stored, too."""

    __tablename__ = "metric_series"

    job_id: Mapped[str] = _job_id()
    name: Mapped[str] = mapped_column(sa.String(200), primary_key=True)
    stride: Mapped[int] = mapped_column(default=1)
    phase: Mapped[int] = mapped_column(default=0)
    points: Mapped[int] = mapped_column(default=0)  # rows at those steps, including abandoned branches
    top: Mapped[int] = mapped_column(default=-1)  # the largest of those steps
    newest: Mapped[int] = mapped_column(default=-1)  # step of the newest point, whose row always exists
    attempt: Mapped[int] = mapped_column(default=0)  # the last attempt that reported it


class Metric(Base):
    """One stored value of a metric, by name and step. A value that is stored later for the same name and step replaces it, unless
    the new value is of an earlier attempt."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = _job_id()
    name: Mapped[str] = mapped_column(sa.String(200), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    value: Mapped[float | None] = mapped_column(sa.Double())  # None: NaN (SQLite stores NaN as NULL)
    at: Mapped[datetime]


class SupersededMetric(Base):
    """A stored metric value of an earlier attempt that a later attempt's different value has replaced."""

    __tablename__ = "superseded_metrics"

    job_id: Mapped[str] = _job_id()
    name: Mapped[str] = mapped_column(sa.String(200), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[float | None] = mapped_column(sa.Double())  # as in ``Metric``
    at: Mapped[datetime]


class HookSample(Base):
    """A rank's hook summary at one step. A summary that is stored later for the same rank and step replaces it, unless the new
    summary is of an earlier attempt."""

    __tablename__ = "hook_samples"

    job_id: Mapped[str] = _job_id()
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    summary: Mapped[dict[str, Any]]
    at: Mapped[datetime]


class ApiToken(Base):
    """An API token. Its text is shown once, when it is created; the row has only its hash."""

    __tablename__ = "api_tokens"
    __table_args__ = (sa.UniqueConstraint("token_hash"), sa.Index("ix_api_tokens_made_with", "made_with"))

    id: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(63))  # for people
    owner: Mapped[str] = mapped_column(sa.String(63))
    role: Mapped[Role]
    scopes: Mapped[list[str]] = mapped_column(Json, default=list)  # empty: everything the role may do
    token_hash: Mapped[str] = mapped_column(sa.String(64))  # hex SHA-256
    created_at: Mapped[datetime]
    created_by: Mapped[str] = mapped_column(sa.String(63))
    made_with: Mapped[str | None] = mapped_column(sa.String(16))  # id of the token that created it: revoked with that
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class Quota(Base):
    """What an owner may use at the same time; None: no limit. The owner ``*`` stands for owners without a row."""

    __tablename__ = "quotas"

    owner: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    queued: Mapped[int | None]  # jobs that have not ended, running ones included
    jobs: Mapped[int | None]  # jobs with an attempt that has not ended
    ranks: Mapped[int | None]  # of such attempts
    gpus: Mapped[int | None]
    updated_at: Mapped[datetime]


class AuditEntry(Base):
    """One entry of the audit log. Rows are never changed or deleted. ``actor`` None: the service itself. ``owner``: of the
    subject, which may be deleted."""

    __tablename__ = "audit"
    __table_args__ = (
        sa.Index("ix_audit_at_id", "at", "id"),
        *(sa.Index(f"ix_audit_{column}_at_id", column, "at", "id") for column in ("actor", "owner", "subject")),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    at: Mapped[datetime]
    actor: Mapped[str | None] = mapped_column(sa.String(63))
    role: Mapped[Role | None]
    token: Mapped[str | None] = mapped_column(sa.String(16))
    token_name: Mapped[str | None] = mapped_column(sa.String(63))
    action: Mapped[str] = mapped_column(sa.String(32))
    subject_kind: Mapped[str] = mapped_column(sa.String(16))
    subject: Mapped[str] = mapped_column(sa.String(64))
    owner: Mapped[str] = mapped_column(sa.String(63))
    data: Mapped[dict[str, Any]]


class SlotHost(Base):
    """The lease of this database's slots by the host whose GPUs and cores they are. There is at most one row; on SQLite none."""

    __tablename__ = "slot_host"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    host: Mapped[str] = mapped_column(sa.String(255))
    expires_at: Mapped[datetime]


class Webhook(Base):
    """An endpoint that events of jobs are sent to. ``cursor``: each event up to this id was delivered, does not match, has a row
    in ``webhook_deliveries``, or is later than the pending one of its job there. The lease is that of the process that delivers
    to it; a change of the row ends the lease."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    url: Mapped[str] = mapped_column(sa.Text)
    types: Mapped[list[str]] = mapped_column(Json)
    owner: Mapped[str | None] = mapped_column(sa.String(63))
    label: Mapped[str | None] = mapped_column(sa.String(320))  # "key=value"
    format: Mapped[str] = mapped_column(sa.String(16))
    secret: Mapped[str | None] = mapped_column(sa.String(64))
    old_secret: Mapped[str | None] = mapped_column(sa.String(64))  # signs too, until ``old_secret_until``
    old_secret_until: Mapped[datetime | None]
    cursor: Mapped[int] = mapped_column(default=0)
    failures: Mapped[int] = mapped_column(default=0)  # in a row
    accepted_at: Mapped[datetime | None]  # the last acceptance of an event
    new_after: Mapped[datetime | None]  # events after the cursor wait until then
    disabled_at: Mapped[datetime | None]
    disabled_reason: Mapped[str | None] = mapped_column(sa.Text)
    created_at: Mapped[datetime]
    created_by: Mapped[str] = mapped_column(sa.String(63))
    lease_owner: Mapped[str | None] = mapped_column(sa.String(128))
    lease_token: Mapped[str | None] = mapped_column(sa.String(64))
    lease_expires_at: Mapped[datetime | None]


class WebhookDelivery(Base):
    """The delivery of one event to one webhook. At most one row of a job is pending; it stays. Of the others, the newest."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (sa.Index("ix_webhook_deliveries_webhook_id_status_job_id", "webhook_id", "status", "job_id"),)

    webhook_id: Mapped[str] = mapped_column(
        sa.String(16), sa.ForeignKey("webhooks.id", ondelete="CASCADE"), primary_key=True
    )
    event_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(sa.String(JOB_ID_LENGTH))  # the job may be deleted
    type: Mapped[str] = mapped_column(sa.String(80))
    status: Mapped[str] = mapped_column(sa.String(16))  # pending, delivered, failed, dropped
    tries: Mapped[int] = mapped_column(default=0)
    answer: Mapped[int | None]  # HTTP status
    error: Mapped[str | None] = mapped_column(sa.Text)
    first_try: Mapped[datetime | None]
    next_try: Mapped[datetime | None]  # None: not tried yet, or done
    at: Mapped[datetime]


class Tracker(Base):
    """The lease of the process that exports to an experiment tracker."""

    __tablename__ = "trackers"

    name: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    lease_owner: Mapped[str | None] = mapped_column(sa.String(128))
    lease_token: Mapped[str | None] = mapped_column(sa.String(64))
    lease_expires_at: Mapped[datetime | None]


class TrackerRun(Base):
    """The export of a job to one tracker; after a branch, one row for each run. Every row of ``TrackerOutbox`` with
    ``id <= sent_row`` and ``step <= sent_step`` was sent, or is not to be sent. ``event``: the same for events."""

    __tablename__ = "tracker_runs"
    __table_args__ = (sa.Index("ix_tracker_runs_sink_done", "sink", "done"),)

    job_id: Mapped[str] = _job_id()
    sink: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    live: Mapped[bool] = mapped_column(default=False)
    done: Mapped[bool] = mapped_column(default=False)  # nothing is to be sent unless the job goes on
    first_attempt: Mapped[int] = mapped_column(default=1)
    last_attempt: Mapped[int | None]  # set once a later run has begun
    base_step: Mapped[int] = mapped_column(default=-1)  # the run has the points after it
    facts: Mapped[dict[str, Any] | None]  # ``sink.Run``, fixed with the first batch
    state: Mapped[dict[str, Any]] = mapped_column(default=dict)  # the sink's
    marks: Mapped[dict[str, int]] = mapped_column(Json, default=dict)  # newest sent step of each series
    sent_row: Mapped[int] = mapped_column(default=0)
    sent_step: Mapped[int] = mapped_column(default=-1)
    event: Mapped[int] = mapped_column(default=0)
    ended_attempt: Mapped[int] = mapped_column(default=0)  # the last one whose end was among these events
    redone_until: Mapped[int] = mapped_column(default=-1)  # newest sent step when the newest attempt began to train
    ended_at: Mapped[datetime | None]  # the end of the job that was sent
    batch: Mapped[dict[str, Any] | None]  # what is being sent: ``settle.Batch``
    seen: Mapped[str | None] = mapped_column(sa.String(128))  # the job when nothing was left to send
    failures: Mapped[int] = mapped_column(default=0)  # in a row
    failing_since: Mapped[datetime | None]
    next_try: Mapped[datetime | None]
    error: Mapped[str | None] = mapped_column(sa.Text)


class TrackerOutbox(Base):
    """The metric values of one message that are still to be sent to a job's trackers. A writer holds the lock on the job's row,
    so within a job the ids grow in commit order. ``points``: JSON {series: value}, in which NaN and infinities are permitted."""

    __tablename__ = "tracker_outbox"
    # autoincrement: an id is never used again, although rows are deleted
    __table_args__ = (
        sa.Index("ix_tracker_outbox_job_id_step_id", "job_id", "step", "id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(sa.String(JOB_ID_LENGTH), sa.ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    step: Mapped[int]
    at: Mapped[datetime]
    points: Mapped[str] = mapped_column(sa.Text)


RECOVERED_FROM_DISK: Final = "found"
"""Key of ``Attempt.launch``: the row was created from files on disk."""
