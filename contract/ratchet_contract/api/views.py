"""Bodies of the REST API, shared by the service (which writes them) and the client (which reads them)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ratchet_contract.api.roles import LOCAL_OWNER
from ratchet_contract.api.view_text import displayed_fields, view_table
from ratchet_contract.checkpoint.resume_report import Base, Redone, ResumeReport
from ratchet_contract.checkpoint.step_ring import Part
from ratchet_contract.phases import AttemptPhase, Cause, Desired, JobPhase, Outcome
from ratchet_contract.spec.git_commit import GitFacts
from ratchet_contract.spec.job import Resolved
from ratchet_hooks.summary import HookSummary

T = TypeVar("T")


class View(BaseModel):
    """Base of most bodies of the API. Times are UTC, RFC 3339 with ``Z``. NaN and infinities are sent as strings."""

    model_config = ConfigDict(ser_json_inf_nan="strings")
    SHOWN: ClassVar[tuple[str, ...]] = ()
    """Fields in ``repr``, which is one line; if empty, all."""

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Return name and value of the fields in ``SHOWN`` (of all fields if it is empty) that have a value."""
        return displayed_fields(self, self.SHOWN or tuple(type(self).model_fields))

    def _repr_html_(self) -> str:
        """Return an HTML table, which notebooks display."""
        return view_table(self)


class Page(View, Generic[T]):
    """One page of a list. ``next_cursor`` None: it is the last page. A cursor is opaque, and is valid only for the query that
    returned it."""

    items: list[T]
    next_cursor: str | None = None


class Warning_(View):
    """A setting in a spec that is valid but without effect, or risky; ``pointer`` is a JSON pointer into the spec."""

    pointer: str
    code: str
    detail: str


class ProgressView(View):
    step: int = 0
    total_steps: int | None = None
    data_epoch: int | None = None
    steps_at_risk: int = Field(0, description="Steps done since the last committed checkpoint.")
    steps_per_second: float | None = Field(None, description="Newest measurement; null if no attempt is training.")

    def step_text(self) -> str:
        """Return ``7/9`` for step 7 of 9, or ``7`` if the total is not known."""
        return str(self.step) if self.total_steps is None else f"{self.step}/{self.total_steps}"


class BudgetView(View):
    preemptions: int = 0
    max_preemptions: int | None = None
    failures: int = 0
    max_failures: int
    attempts_without_progress: int = 0


class GoodputView(View):
    """How the time of a job or an attempt was spent, in seconds. Each second belongs to one part; the parts add up to
    ``wall_seconds``."""

    goodput: float | None = Field(
        None,
        description="useful_seconds / wall_seconds; null: no time has passed yet, or unknown, since a script without a "
        "Session ran.",
    )
    wall_seconds: float = Field(
        description="For a job, the time since its submission without the time in which it was suspended or ended; for an "
        "attempt, its whole duration."
    )
    queued_seconds: float = Field(description="In no attempt (queue, back-off), or in the engine's queue.")
    launching_seconds: float = Field(description="From the first agent's start to the start of training.")
    useful_seconds: float = Field(
        description="Training whose steps were kept; includes unsaved steps while the attempt runs."
    )
    lost_seconds: float = Field(description="Steps that are in no checkpoint, at the attempt's mean step time.")
    stall_seconds: float = Field(description="Training was blocked by a save.")
    stopping_seconds: float = Field(
        description="From the stop request, or from the failure that ended the ranks (a hang: their last progress), to the end."
    )
    unseen_seconds: float = Field(description="A script without a Session ran.")


class EnvironmentView(View):
    """The software that an attempt trained with."""

    ratchet: str = Field(description="Version of Ratchet in the ranks' interpreter.")
    python: str
    packages: list[str] = Field(
        description="All packages of rank 0's interpreter except Ratchet: `name==version`, sorted."
    )
    digest: str = Field(description="SHA-256 of `packages`, one per line.")
    git: GitFacts | None = Field(None, description="The git commit of its code; null: unknown.")


class MetricSummary(View):
    """A curve in few points."""

    name: str
    points: list[tuple[int, float]] = Field(
        description="Step and value of at most 40 stored points, about evenly spaced over the steps, with the first and the last."
    )


class AttemptSummary(View):
    number: int
    outcome: Outcome | None = None
    cause: Cause | None = None
    proof: str | None = Field(None, description="As in an attempt.")


class HookFigures(View):
    phase: str
    compression_rate: float | None
    iteration: int


class JobSummary(View):
    """What a list of jobs shows of a job's training."""

    metric: MetricSummary | None = Field(
        None, description="The metric `loss`, else the first by name; null: it has no point, or the job has no metric."
    )
    attempts: list[AttemptSummary] = Field(description="The newest 20, oldest first.")
    hook: HookFigures | None = Field(
        None, description="The newest summary of rank 0's hook in the running attempt; null: there is none."
    )
    last_checkpoint_at: datetime | None = Field(None, description="When `last_checkpoint` was committed.")
    goodput: float | None = Field(None, description="As in the `goodput` of one job.")


class JobView(View):
    SHOWN = ("id", "name", "phase", "attempt", "progress.step", "progress.total_steps", "reason")

    id: str
    name: str
    owner: str = Field(LOCAL_OWNER, description="Owner who submitted it; only this owner and admins may act on it.")
    phase: JobPhase
    desired: Desired
    reason: str | None = Field(
        None, description="Stable code: a cause, or why it waits (backoff, no-slot, no-progress ...)."
    )
    message: str | None = Field(None, description="The reason as text, with the next step.")
    labels: dict[str, str]
    priority: int
    spec: dict[str, Any]
    resolved: Resolved
    warnings: list[Warning_] = []
    attempt: int = Field(description="Number of the newest attempt; 0 before the first.")
    progress: ProgressView
    budgets: BudgetView
    hook: str
    last_checkpoint: str | None = None
    forked_from: str | None = Field(None, description="<job id>/<checkpoint id>")
    adopted_from: str | None = Field(
        None, description="Directory of the run without a service from whose newest checkpoint the job continued."
    )
    work_dir: str | None = Field(
        None, description="Current directory of its ranks, once an attempt has created it; only when one job is read."
    )
    environment: EnvironmentView | None = Field(
        None,
        description="Environment of its newest attempt that began to train; only when one job is read. null: none did, or "
        "its Ratchet does not record it.",
    )
    goodput: GoodputView | None = Field(None, description="How its time was spent; only when one job is read.")
    position: int | None = Field(
        None,
        description="Position in the queue, from 1; only when one job is read. null: it is not queued, is in a back-off, or "
        "is too far back among several owners' jobs (`ahead_at_least`).",
    )
    ahead_at_least: int | None = Field(
        None,
        description="Lower bound of the number of jobs ahead of it, if it is too far back to have a position.",
    )
    summary: JobSummary | None = Field(None, description="Only in a list, with `include=summary`.")
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    not_before: datetime | None = None


class PlanView(View):
    """Response to ``?dry_run=true``: what each attempt would be launched with, and the warnings about the spec. A spec that a
    check refuses gets an error response instead. No job is stored."""

    spec: dict[str, Any]
    resolved: Resolved
    warnings: list[Warning_]
    launch: dict[str, Any] = Field(
        description="The launcher's request: agent command, rank commands, variables (no secret values)."
    )
    hook_memory_bytes: int | None = Field(
        None,
        description="Estimated size of the hook's state on each rank; null if the task does not define the shapes of its "
        "parameters (`parameter_shapes`), and for a custom hook.",
    )


class NodeView(View):
    node: int
    host: str | None = None
    pid: int | None = None
    gpus: list[int] = []
    phase: AttemptPhase
    address: str | None = Field(None, description="host:port at which the job's other nodes reach it.")


class ResumeReportView(View, ResumeReport):
    """How an attempt began. Verdict ``exact``: every component of every rank, and every recorded fact, is unchanged."""

    SHOWN = ("verdict", "base.step", "world_size", "components", "differences", "quarantined", "notes")


class StragglerView(View):
    """A rank for which the others waited at each step."""

    rank: int
    node: int
    host: str | None = None
    ready_seconds: float = Field(description="From the start of a step to its first gradients; a median.")
    others_seconds: float = Field(description="The same of the other ranks.")
    share: float = Field(description="Share of a step for which the others waited, at most.")


class AttemptView(View):
    SHOWN = ("number", "phase", "cause", "base.step", "last_step", "steps_lost", "proof")

    job_id: str
    number: int
    phase: AttemptPhase
    outcome: Outcome | None = None
    cause: Cause | None = None
    rank: int | None = Field(None, description="The rank that caused the end.")
    exit_code: int | None = None
    message: str | None = None
    base: Base | None = None
    last_step: int = 0
    steps_done: int = Field(0, description="last_step - base.step: steps executed by this attempt.")
    steps_lost: int | None = Field(
        None, description="Executed, but not in any checkpoint that a later attempt can start from."
    )
    committed_step: int | None = None
    resume_report: ResumeReportView | None = None
    proof: str | None = Field(
        None,
        description="The report's verdict, and the result of comparing redone steps: `exact, proved (37 of 37 redone steps)`, "
        "`exact, no step compared`, `not-exact`, `not-exact: code changed`. Appended to `exact`, after a resume that was not "
        "exact: `; not exact since the resume from step 90, attempt 1`.",
    )
    redone: Redone = Field(Redone(), description="Repeated steps, compared with their first execution.")
    metrics_differ: list[str] = Field(
        [],
        description="Names of metrics whose values differ in repeated steps that are otherwise identical, usually times.",
    )
    nodes: list[NodeView] = []
    excluded_nodes: list[str] = Field([], description="Nodes that it stayed away from (policy.exclude_nodes).")
    stragglers: list[StragglerView] = Field(
        [], description="Ranks that were slower than the others; see event straggler."
    )
    created_at: datetime
    begun_at: datetime | None = Field(
        None, description="Start of its first agent; before that it waited for its engine."
    )
    training_at: datetime | None = None
    stop_at: datetime | None = Field(None, description="When its agent received a stop request.")
    notice_seconds: float | None = Field(
        None,
        description="Seconds from then until it would be killed: stop_grace, or for an external stop preemption_notice.",
    )
    notice_used: float | None = Field(
        None,
        description="Seconds from the stop request to the commit of its checkpoint, or to the end if nothing was left to "
        "save; null: no stop, or no checkpoint was committed.",
    )
    ended_at: datetime | None = None
    goodput: GoodputView | None = Field(None, description="How its time was spent.")
    environment: EnvironmentView | None = Field(
        None, description="Only when one attempt is read; null: it has not begun to train."
    )


class CheckpointView(View):
    SHOWN = ("id", "state", "reason", "size", "pinned", "lineage", "verification")

    id: str
    job_id: str
    step: int
    attempt: int
    parent: Base | None = None
    state: Literal["committed", "quarantined", "deleted"]
    reason: str
    finished: bool = False
    adopted: bool = Field(False, description="Found valid on disk after its report was lost.")
    pinned: bool = False
    digest: str
    size: int
    files: int
    seconds: float | None = Field(None, description="From the step boundary to the manifest's sync.")
    stall: float | None = Field(None, description="Seconds of these in which rank 0's training was blocked.")
    verified_at: datetime | None = None
    verification: Literal["ok", "damaged"] | None = None
    verification_error: str | None = None
    hook_iteration: int | None = Field(None, description="Rank 0's hook iteration, as saved.")
    lineage: Literal["current", "abandoned"] = Field(
        "current",
        description="abandoned: on a branch that was left by a resume from an earlier step. No attempt will start from it.",
    )
    metric: float | None = Field(
        None,
        description="The metric value that `checkpoint.keep_best` uses; null: none was logged at its step, or NaN.",
    )
    uri: str | None = Field(
        None, description="URI of its copy in the object store of `checkpoint.uri`; null: there is none."
    )
    uploaded_at: datetime | None = Field(
        None, description="When that copy was complete: from then on the checkpoint survives the loss of its machine."
    )
    created_at: datetime


class CheckpointDetail(CheckpointView):
    """A checkpoint with its manifest, if that can still be read."""

    manifest: dict[str, Any] | None = None


class EventView(View):
    SHOWN = ("at", "attempt", "type", "message")

    id: int
    job_id: str
    at: datetime
    type: str
    attempt: int | None = None
    message: str
    data: dict[str, Any] = {}


class HookView(View):
    """The state of a job's hook, from the newest summaries of its ranks; ``ranks`` has one for each rank that has reported."""

    SHOWN = ("name", "wrapper", "phase", "iteration", "compression_rate", "step", "source")

    job_id: str
    source: Literal["live", "checkpoint"] | None = Field(
        None,
        description="Source of the figures: the running attempt, or the checkpoint from which the next one starts; null: "
        "neither exists.",
    )
    name: str
    wrapper: str | None
    parameters: dict[str, Any]
    stateful: bool
    phase: str | None = None
    iteration: int | None = None
    compression_rate: float | None = None
    elements_before: int | None = None
    elements_after: int | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    residual_norm: dict[int, float | None] = Field({}, description="Per rank; null where the hook keeps none.")
    memory_bytes: int | None = None
    averager_step: int | None = Field(None, description="Steps counted by the parameter averager (post_localSGD).")
    next_averaging: int | None = Field(None, description="Step after which parameters are next averaged.")
    step: int | None = None
    checkpoint_iteration: int | None = Field(None, description="Iteration in the last committed checkpoint.")
    checkpoint_id: str | None = None
    ranks: list[HookSummary] = []
    updated_at: datetime | None = None


class HookSampleView(View):
    """One stored summary of one rank's hook, of ``GET .../hook/history``."""

    SHOWN = ("attempt", "summary.rank", "summary.step", "summary.phase", "summary.iteration", "summary.residual_norm")

    attempt: int
    at: datetime
    summary: HookSummary


class MetricPoint(View):
    step: int
    attempt: int
    value: float
    at: datetime


class MetricSeries(View):
    """The logged values of one metric. A long series is thinned when it is stored: beyond the service's limit every second
    step is dropped, but the newest point stays."""

    name: str
    superseded: list[MetricPoint] = Field(
        [],
        description="Values of earlier attempts at steps that were repeated with a different value; 1000 at most.",
    )
    every: int = Field(
        1, description="About one in N of the logged steps is kept, N being this value (a power of two; 1: all)."
    )
    total: int = Field(
        0,
        description="Number of stored points in the requested range of steps, including those that `max_points` leaves out.",
    )
    points: list[MetricPoint]


class MetricsView(View):
    job_id: str
    series: list[MetricSeries]


class LogLine(View):
    """One line of a rank's log. ``id`` is ``<attempt>.<rank>.<byte offset after the line>``; sent as ``Last-Event-ID``, it
    continues a stream after this line."""

    id: str
    attempt: int
    rank: int
    text: str
    at: datetime | None = Field(
        None,
        description="Upper bound of the time when it was written, at most six seconds too late; null: not known (yet).",
    )
    left_out: int | None = Field(
        None,
        description="Number of bytes dropped here, the middle of a log that is too long; null: an ordinary log line.",
    )


class HookInfo(View):
    name: str
    title: str
    available: bool
    stateful: bool
    replicas: str
    backends: list[str]
    wrappers: list[str] = []
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the hook's part of the spec.")
    warnings: list[str] = []


class VerifyResult(View):
    id: str
    verification: Literal["ok", "damaged"]
    error: str | None = None
    bytes_checked: int
    seconds: float
    state: Literal["committed", "quarantined"] = Field(
        "committed",
        description="quarantined: it is damaged, and was moved to the quarantine, since no attempt can be using it.",
    )


class DifferenceView(View):
    component: str
    name: str = Field(description="The tensor's name in the checkpoint, or a JSON pointer into the rank's state.")
    rank: int | None = Field(None, description="null: shared by all ranks.")
    place: str = Field(description="Readable name of the tensor or value.")
    detail: str = Field(description="The difference: number of elements, the first one, both values.")


class ComparisonView(View):
    """The result of comparing two checkpoints bit for bit, of two jobs or of one."""

    job_id: str
    checkpoint_id: str
    with_job_id: str
    with_checkpoint_id: str
    identical: bool
    step: int
    equal_through: int | None = Field(
        None,
        description="The newest step before it at which both jobs' checkpoints are identical; null: none is stored.",
    )
    first_step: int | None = Field(
        None,
        description="The first step after which fingerprints of the ranks differ (a sample of the parameters that changes "
        "with the step, the generators, the position in the data). null: none differs, or there are none.",
    )
    first_part: Part | None = Field(
        None, description="The part of the state that differs after that step, by these fingerprints."
    )
    tensors: int
    different: int = Field(description="Number of tensors and values in the ranks' states that differ.")
    differences: list[DifferenceView] = Field(description="The first 50 of them, causes before consequences.")
    unsaved: list[str] = Field(
        [],
        description="If something differs: the first 50 attributes and variables that training had changed by then and that "
        "are in no checkpoint; they are not compared.",
    )
    advice: str | None = Field(None, description="Explanation of the first difference, with the next step.")


class PruneResult(View):
    """The removed checkpoints and files; with ``dry_run``: those that would be removed."""

    dry_run: bool
    checkpoints: list[str] = Field(description="Checkpoints of abandoned branches, and files left by dead attempts.")
    quarantined: list[str] = Field(description="Directories of the quarantine; empty unless asked for.")
    size: int = Field(description="Bytes of their files.")


FileKind = Literal["file", "directory", "symlink", "special"]


class FileView(View):
    """One file, directory or other entry in a job's working directory."""

    path: str = Field(
        description="Below the working directory, with `/`. Bytes that are not UTF-8 are shown as `\\udcff`."
    )
    kind: FileKind = Field(description="special: a FIFO, a socket or a device.")
    size: int | None = Field(None, description="Bytes of a file.")
    modified_at: datetime | None = Field(None, description="null: its time is not a valid date.")
    from_code: bool = Field(
        False, description="It belongs to the job's code and is unchanged; listed only with `all=true`."
    )
    refused: str | None = Field(
        None,
        description="Why its content is not available, as a problem code: symbolic-link, special-file, file-unreadable, "
        "too-deep (the content of that directory is not listed), name-not-utf8 (it is in the archive of its directory).",
    )


class DeleteResult(View):
    """What ``DELETE /v1/jobs/{id}`` has kept of the job's files."""

    id: str
    checkpoints: str | None = Field(None, description="Directory of the kept checkpoints; null: they were deleted.")
    outputs: str | None = Field(
        None,
        description="Directory with the files of the job's working directory; `?outputs=true` removes it, now or later. "
        "null: there were none, or they were deleted.",
    )
    remote: str | None = Field(
        None, description="Objects left in the object store, and why; null: none, or the job had none there."
    )
