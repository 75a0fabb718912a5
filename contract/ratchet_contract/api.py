"""Bodies of the REST API, shared by the service (which writes them) and the client (which reads them)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ratchet_contract.access import LOCAL_OWNER
from ratchet_contract.git_facts import GitFacts
from ratchet_contract.phases import AttemptPhase, Cause, Desired, JobPhase, Outcome
from ratchet_contract.resume import Base, Redone, ReportOf
from ratchet_contract.spec import Resolved
from ratchet_contract.step_ring import Part
from ratchet_contract.view_text import shown, table
from ratchet_hooks.summary import HookSummary

T = TypeVar("T")


class View(BaseModel):
    """Times are UTC, RFC 3339 with ``Z``. NaN and infinities travel as strings."""

    model_config = ConfigDict(ser_json_inf_nan="strings")
    SHOWN: ClassVar[tuple[str, ...]] = ()
    """Fields in ``repr``, which is one line; without any, all."""

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        return shown(self, self.SHOWN or tuple(type(self).model_fields))

    def _repr_html_(self) -> str:
        """For notebooks."""
        return table(self)


class Page(View, Generic[T]):
    """One page. ``next_cursor`` None: the end. A cursor is opaque and belongs to the query that made it."""

    items: list[T]
    next_cursor: str | None = None


class Warning_(View):
    """Something in a spec that is legal but without effect, or risky; ``pointer`` is a JSON pointer into the spec."""

    pointer: str
    code: str
    detail: str


class ProgressView(View):
    step: int = 0
    total_steps: int | None = None
    data_epoch: int | None = None
    steps_at_risk: int = Field(0, description="Steps done since the last committed checkpoint.")
    steps_per_second: float | None = Field(None, description="Newest measurement; null when no attempt trains.")

    def out_of(self) -> str:
        """``7/9``, or ``7`` where nobody has said how many there are to be."""
        return str(self.step) if self.total_steps is None else f"{self.step}/{self.total_steps}"


class BudgetView(View):
    preemptions: int = 0
    max_preemptions: int | None = None
    failures: int = 0
    max_failures: int
    attempts_without_progress: int = 0


class GoodputView(View):
    """Seconds; each belongs to one part, and the parts add up to ``wall_seconds``."""

    goodput: float | None = Field(
        None,
        description="useful_seconds / wall_seconds; null: nothing has passed yet, or a script without a Session ran, of which "
        "nobody can tell.",
    )
    wall_seconds: float = Field(
        description="Of a job since its submission, without the time that it was suspended or over; of an attempt all of it."
    )
    queued_seconds: float = Field(description="In no attempt (queue, back-off), or in the engine's queue.")
    launching_seconds: float = Field(description="From the first agent to the beginning of training.")
    useful_seconds: float = Field(
        description="Training that counts; steps not saved yet are in it while the attempt runs."
    )
    lost_seconds: float = Field(description="Steps that were done and are in no checkpoint, at the attempt's pace.")
    stall_seconds: float = Field(description="Training stood still for a save.")
    stopping_seconds: float = Field(
        description="From the stop's request, or where what ended the ranks began (a hang: when they last moved), to the end."
    )
    unseen_seconds: float = Field(description="A script without a Session ran.")


class EnvironmentView(View):
    """What an attempt trained with."""

    ratchet: str = Field(description="Version of Ratchet in the ranks' interpreter.")
    python: str
    packages: list[str] = Field(description="All that rank 0's interpreter has, but Ratchet: `name==version`, sorted.")
    digest: str = Field(description="SHA-256 of `packages`, one a line.")
    git: GitFacts | None = Field(None, description="The git commit that its code was taken at; null: none is known.")


class JobView(View):
    SHOWN = ("id", "name", "phase", "attempt", "progress.step", "progress.total_steps", "reason")

    id: str
    name: str
    owner: str = Field(
        LOCAL_OWNER, description="Who submitted it; whoever acts on it is of the same owner, or an admin."
    )
    phase: JobPhase
    desired: Desired
    reason: str | None = Field(
        None, description="Machine word: a cause, or why it waits (backoff, no-slot, no-progress ...)."
    )
    message: str | None = Field(None, description="The same for people, with what to do next.")
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
        None, description="Directory of the run without a service from whose newest checkpoint the job went on."
    )
    work_dir: str | None = Field(
        None, description="Current directory of its ranks, once an attempt has made it; told where one job is read."
    )
    environment: EnvironmentView | None = Field(
        None,
        description="Of its newest attempt that began to train; told where one job is read. null: none did, or by a Ratchet that "
        "does not record it.",
    )
    goodput: GoodputView | None = Field(None, description="Where its time went; told where one job is read.")
    position: int | None = Field(
        None,
        description="In the queue, from 1; told where one job is read. null: it is not queued, a back-off holds it, or it is "
        "too far behind among several owners' jobs (`ahead_at_least`).",
    )
    ahead_at_least: int | None = Field(
        None,
        description="Where it is queued too far behind to be given a position here: so many jobs, or more, are ahead.",
    )
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    not_before: datetime | None = None


class PlanView(View):
    """``?dry_run=true``: what would be run, and everything that was checked. Nothing is stored."""

    spec: dict[str, Any]
    resolved: Resolved
    warnings: list[Warning_]
    launch: dict[str, Any] = Field(
        description="The launcher's request: agent command, rank commands, variables (no secret values)."
    )
    hook_memory_bytes: int | None = Field(
        None,
        description="What the hook's state will hold on each rank, estimated; null where the task does not tell the shapes of "
        "its parameters (`parameter_shapes`), and for a custom hook.",
    )


class NodeView(View):
    node: int
    host: str | None = None
    pid: int | None = None
    gpus: list[int] = []
    phase: AttemptPhase
    address: str | None = Field(None, description="host:port at which the job's other nodes reach it.")


class BaseView(View):
    """The checkpoint that an attempt, or another checkpoint, goes on from."""

    step: int = Field(0, description="0 without the others: from scratch.")
    attempt: int | None = Field(None, description="The attempt that wrote it.")
    digest: str | None = Field(None, description="Of its manifest.")

    @classmethod
    def of(cls, base: Base) -> BaseView:
        return cls(step=base.step, attempt=base.epoch, digest=base.digest)


class ResumeReportView(View, ReportOf[BaseView]):
    """How an attempt began. ``exact``: every component of every rank, and every recorded fact, is as it was."""

    SHOWN = ("verdict", "base.step", "world_size", "components", "differences", "quarantined", "notes")


class AttemptView(View):
    SHOWN = ("number", "phase", "cause", "base.step", "last_step", "steps_lost", "proof")

    job_id: str
    number: int
    phase: AttemptPhase
    outcome: Outcome | None = None
    cause: Cause | None = None
    rank: int | None = Field(None, description="The rank the cause comes from.")
    exit_code: int | None = None
    message: str | None = None
    base: BaseView | None = None
    last_step: int = 0
    steps_done: int = Field(0, description="last_step - base.step: steps executed by this attempt.")
    steps_lost: int | None = Field(
        None, description="Executed, but not in any checkpoint that a later attempt can start from."
    )
    committed_step: int | None = None
    resume_report: ResumeReportView | None = None
    proof: str | None = Field(
        None,
        description="The report's verdict, and what redone steps have shown: `exact, proved (37 of 37 redone steps)`, "
        "`exact, not yet proved`, `not-exact`, `not-exact: code changed`. Behind `exact`, after a "
        "resume that was not: `; not exact since the resume from step 90, attempt 1`.",
    )
    redone: Redone = Field(Redone(), description="Steps that it did again, compared with the first time.")
    metrics_differ: list[str] = Field(
        [],
        description="Logged values that are other ones in steps that were done again and are the same: times, as a rule.",
    )
    nodes: list[NodeView] = []
    created_at: datetime
    begun_at: datetime | None = Field(None, description="Its first agent began; until then it waited for its engine.")
    training_at: datetime | None = None
    stop_at: datetime | None = Field(None, description="Its agent heard of a stop.")
    notice_seconds: float | None = Field(
        None,
        description="What it then had until it would be killed: stop_grace, or for a stop from outside preemption_notice.",
    )
    notice_used: float | None = Field(
        None,
        description="Seconds from the stop's request to the commit of its checkpoint, or where nothing was left to save to the "
        "end; null: no stop, or no checkpoint came of it.",
    )
    ended_at: datetime | None = None
    goodput: GoodputView | None = Field(None, description="Where its time went.")
    environment: EnvironmentView | None = Field(
        None, description="Told where one attempt is read; null: it has not begun to train."
    )


class CheckpointView(View):
    SHOWN = ("id", "state", "reason", "size", "pinned", "lineage", "verification")

    id: str
    job_id: str
    step: int
    attempt: int
    parent: BaseView | None = None
    state: Literal["committed", "quarantined", "deleted"]
    reason: str
    finished: bool = False
    adopted: bool = Field(False, description="Found valid on disk after its report was lost.")
    pinned: bool = False
    digest: str
    size: int
    files: int
    seconds: float | None = Field(None, description="From the step boundary to the manifest's sync.")
    stall: float | None = Field(None, description="Seconds of these that rank 0's training stood still.")
    verified_at: datetime | None = None
    verification: Literal["ok", "damaged"] | None = None
    verification_error: str | None = None
    hook_iteration: int | None = Field(None, description="Rank 0's hook iteration, as saved.")
    lineage: Literal["current", "abandoned"] = Field(
        "current",
        description="abandoned: on a branch that a resume from an earlier step left behind. No attempt will start from it.",
    )
    metric: float | None = Field(
        None,
        description="The value by which `checkpoint.keep_best` judges it; null: none was logged at its step, or NaN.",
    )
    uri: str | None = Field(
        None, description="Of its copy in the object store of `checkpoint.uri`; null: there is none."
    )
    uploaded_at: datetime | None = Field(
        None, description="When that copy was whole: from then on the checkpoint survives the loss of its machine."
    )
    created_at: datetime


class CheckpointDetail(CheckpointView):
    """With what the manifest says, when it can still be read. ``attempt`` in it is ``epoch`` in the file."""

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
    """The newest summaries; ``ranks`` has one entry per rank that reported."""

    SHOWN = ("name", "wrapper", "phase", "iteration", "compression_rate", "step", "source")

    job_id: str
    source: Literal["live", "checkpoint"] | None = Field(
        None,
        description="Where the figures are from: the attempt that runs, or the checkpoint that the next one starts from; null: "
        "neither is there.",
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
    averager_step: int | None = Field(
        None, description="Steps that the averager of parameters has seen (post_localSGD)."
    )
    next_averaging: int | None = Field(None, description="Step after which parameters are averaged next.")
    step: int | None = None
    checkpoint_iteration: int | None = Field(None, description="Iteration in the last committed checkpoint.")
    checkpoint_id: str | None = None
    ranks: list[HookSummary] = []
    updated_at: datetime | None = None


class HookSampleView(View):
    """One kept summary of one rank, of ``GET .../hook/history``."""

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
    """A long series is thinned as it is stored: beyond the service's bound every second step goes, the newest point stays."""

    name: str
    superseded: list[MetricPoint] = Field(
        [],
        description="What earlier attempts had logged at steps that were done again, where the later value is another one; 1000 "
        "at most.",
    )
    every: int = Field(
        1, description="Of the steps at which it was logged, about one in so many is kept (a power of two; 1: all are)."
    )
    points: list[MetricPoint]


class MetricsView(View):
    job_id: str
    series: list[MetricSeries]


class LogLine(View):
    """``id`` is ``<attempt>.<rank>.<byte offset after the line>``: what ``Last-Event-ID`` takes."""

    id: str
    attempt: int
    rank: int
    text: str
    at: datetime | None = Field(
        None, description="It was written by then, and at most six seconds earlier; null: not known (yet)."
    )
    left_out: int | None = Field(
        None, description="Bytes that are not kept here: the middle of a log that is too long; null: a line of the log."
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
        "committed", description="quarantined: it is damaged, and was set aside, since no attempt can be using it."
    )


class DifferenceView(View):
    component: str
    name: str = Field(description="The tensor's name in the checkpoint, or a JSON pointer into the rank's state.")
    rank: int | None = Field(None, description="null: shared by all ranks.")
    place: str = Field(description="For people: which tensor or value it is.")
    detail: str = Field(description="What differs there: how many elements, the first one, both values.")


class ComparisonView(View):
    """Two checkpoints, of two jobs or of one, bit for bit."""

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
        description="The first step behind which fingerprints of the ranks differ: a sample of the parameters that changes with "
        "the step, the generators, the position in the data. null: none differs, or none are there.",
    )
    first_part: Part | None = Field(None, description="What differs behind that step, by these fingerprints.")
    tensors: int
    different: int = Field(description="Tensors and places in the ranks' states that differ.")
    differences: list[DifferenceView] = Field(description="The first 50 of them, causes before consequences.")
    unsaved: list[str] = Field(
        [],
        description="Where something differs: what training had changed by then that no checkpoint has; it is not compared. The "
        "first 50.",
    )
    advice: str | None = Field(None, description="What the first of them means, and what to do.")


class PruneResult(View):
    """What was removed, or with ``dry_run`` would be."""

    dry_run: bool
    checkpoints: list[str] = Field(description="Of branches left behind, and remains of attempts that are dead.")
    quarantined: list[str] = Field(description="Directories of the quarantine; empty unless asked for.")
    size: int = Field(description="Bytes of their files.")


FileKind = Literal["file", "directory", "symlink", "special"]


class FileView(View):
    """One name in a job's working directory."""

    path: str = Field(
        description="Below the working directory, with `/`. Bytes that are not UTF-8 are shown as `\\udcff`."
    )
    kind: FileKind = Field(description="special: a FIFO, a socket or a device.")
    size: int | None = Field(None, description="Bytes of a file.")
    modified_at: datetime | None = Field(None, description="null: it has a time that no calendar has.")
    from_code: bool = Field(
        False, description="The job's code brought it there, and it is unchanged; listed with `all=true` alone."
    )
    refused: str | None = Field(
        None,
        description="Why its content is not given, as the code of a problem: symbolic-link, special-file, file-unreadable, "
        "too-deep (what is in that directory is not listed), name-not-utf8 (it is in the archive of its directory).",
    )


class DeleteResult(View):
    """What ``DELETE /v1/jobs/{id}`` left behind."""

    id: str
    checkpoints: str | None = Field(None, description="Directory of the kept checkpoints; null: they were deleted.")
    outputs: str | None = Field(
        None,
        description="Directory of what the job left in its working directory; `?outputs=true` removes it, now or later. null: it "
        "left nothing there, or it was deleted.",
    )
    remote: str | None = Field(
        None, description="What is left in the object store, and why; null: nothing, or the job had none there."
    )
