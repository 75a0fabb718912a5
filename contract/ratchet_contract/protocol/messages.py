"""Files and messages between launcher, agent, ranks and service. All JSON; all validated on arrival."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ratchet_contract.checkpoint.resume_report import Base, ResumeReport, Segment, StepDifference, rename_epoch
from ratchet_contract.phases import AttemptPhase, Cause, Desired
from ratchet_contract.protocol.timing import Deadlines, Pace, deadlines
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_contract.spec.trial import FaultSpec
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_hooks.summary import HookSummary

AGENT_RANK: Final = -1
"""``rank`` of a message from node 0's agent about the job's copies, in a separate spool."""
LOG_BYTES: Final = 256 << 20
"""Disk space in bytes for one rank's log in one attempt, unless the service specifies otherwise."""


def node_rank(node: int) -> int:
    """Return the number for ``rank`` in an agent's messages about its node: -2 for node 0, -3 for node 1."""
    return -2 - node


def node_of_agent_rank(rank: int) -> int | None:
    """Return the node whose ``node_rank`` is ``rank``; None if ``rank`` is a real rank or ``AGENT_RANK``."""
    return -2 - rank if rank <= node_rank(0) else None


class Message(BaseModel):
    """Base of files and messages. Unknown keys are ignored, so that a new key needs no new ``PROTOCOL_VERSION``; unknown keys
    of a specification are refused. NaN and infinities are sent as the strings "NaN", "Infinity", "-Infinity"."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")


class ServiceFile(Message):
    """Content of ``service.json``, by which other processes, such as agents, find the running service."""

    protocol: int = PROTOCOL_VERSION
    url: str
    pid: int
    started_at: str


class ServicePointer(Message):
    """Content of a file in the user's runtime directory (``service_pointers``): the process that serves the run directory
    ``home``. ``start_time``: as in ``AgentFile``."""

    home: str
    pid: int
    start_time: int


class ForkSource(Message):
    """The checkpoint, of another job or of a run without a service, that a job starts from while it has none of its own."""

    job_root: str
    step: int
    attempt: int
    digest: str
    adopted: str | None = Field(
        None, description="Directory of the run without a service that was adopted; job_root has a copy. null: a fork."
    )


class LaunchFile(Message):
    """Content of ``launch.json``: the instructions for the agents and the ranks of one attempt. It contains the values of the
    variables in ``secret_env``, but not those of the variables in ``secrets``."""

    _older = model_validator(mode="before")(rename_epoch)

    protocol: int = PROTOCOL_VERSION
    job_id: str
    attempt: int
    node: int = Field(0, description="In launch.json always 0: each agent receives its own number (``for_node``).")
    world_size: int
    ranks: list[int] = Field(description="Global ranks of this node, in local order.")
    spec: JobSpec
    resolved: Resolved
    job_root: str
    attempt_dir: str
    code_dir: str | None = Field(None, description="The code snapshot, read-only; null: no user code.")
    start_file: str | None = Field(None, description="The copy of start_from's file, read-only; null: none.")
    environments_dir: str | None = Field(
        None, description="Where the environments of jobs are kept, below a directory for each user; null: nowhere."
    )
    workdir: str = Field(
        description="Current directory of every rank: the job's own writable copy of the snapshot, kept over all attempts."
    )
    gpus: list[int] = []
    report_token: str
    service_file: str = Field(description="File with the service's address; read again whenever the connection fails.")
    service_url: str | None = Field(None, description="The service's address, if it is fixed; then no file is read.")
    service_ca: str | None = Field(
        None, description="PEM of the authorities by which the service's certificate is known; null: the system's."
    )
    lineage: list[Segment] = Field(
        [], description="Checkpoints on disk that may be resumed from; the newest valid one is used."
    )
    recorded: Base | None = Field(
        None, description="The newest checkpoint of the lineage that the service knows to be committed; null: none."
    )
    fork: ForkSource | None = None
    desired: Desired = Desired.RUN
    save_seconds: float = Field(0.0, description="The longest of the job's last saves, in seconds; 0: none yet.")
    log_bytes: int = Field(LOG_BYTES, description="Disk space for each rank's log; its beginning and its end are kept.")
    pace: Pace | None = Field(None, description="The job's pace as measured in earlier attempts; null: nothing yet.")
    exclude_nodes: list[str] = Field([], description="Engine's names of nodes on which this attempt must not run.")

    @property
    def is_standalone(self) -> bool:
        """True if the run has no service: its user has started the script directly."""
        return not self.service_file

    @property
    def root_base(self) -> Base | None:
        """The base of the lineage's first checkpoint: the fork's source, else an empty ``Base``. None if this base is unknown."""
        fork = self.fork
        root = Base() if fork is None else Base(step=fork.step, attempt=fork.attempt, digest=fork.digest)
        return root if min((segment.after_step for segment in self.lineage), default=root.step) == root.step else None

    @property
    def mismatch_setting(self) -> str:
        """The name under which the user of this run sets ``policy.on_hook_mismatch``, for messages."""
        return "Session(on_hook_mismatch=...)" if self.is_standalone else "policy.on_hook_mismatch"

    @property
    def deadlines(self) -> Deadlines:
        """Time limits for ranks without progress in this attempt."""
        return deadlines(self.spec.policy, self.pace)

    @property
    def faults(self) -> list[FaultSpec]:
        """The faults that a trial injects into this attempt; empty without a trial."""
        plan = [] if self.spec.trial is None else self.spec.trial.faults
        return [fault for fault in plan if fault.attempt == self.attempt]

    def for_node(self, node: int) -> LaunchFile:
        """Return a copy with the number and the ranks of node ``node``. Raises ``ValueError`` if there is no such node."""
        if not 0 <= node < self.spec.world.nodes:
            raise ValueError(f"there is no node {node} among {self.spec.world.nodes}")
        per_node = self.spec.world.ranks_per_node
        return self.model_copy(update={"node": node, "ranks": list(range(node * per_node, (node + 1) * per_node))})


class AgentFile(Message):
    """Content of ``agent.json``: the agent process that holds the lock. ``start_time``: field 22 of /proc/<pid>/stat, in clock
    ticks since boot. Every version has these keys, whatever its protocol: they are used to find an agent of another version
    and to stop it."""

    pid: int
    start_time: int
    host: str


class Control(Message):
    """Content of ``control.json``: the newest desired state of a node's ranks. It is level-triggered: a reader that misses one
    version of the file acts on the next. ``checkpoint_request``: number of requests to save now in this attempt."""

    desired: Desired = Desired.RUN
    cause: Cause | None = Field(
        None, description="The cause that a stop will have: api-suspend, api-cancel, api-preempt, sigterm ..."
    )
    checkpoint_request: int = 0
    peer_end: str | None = Field(
        None,
        description="Message about another node's agent that ended with a failure: this node's ranks cannot continue.",
    )
    peer_cause: Cause | None = Field(
        None, description="hang: the other node ended with a hang, and this node's ranks write their stacks."
    )


# --- rank -> agent (spool lines) ---------------------------------------------------------------------------------------


class Started(Message):
    kind: Literal["started"] = "started"
    rank: int
    pid: int
    host: str
    at: str
    device: str
    torch: str
    start: str | None = Field(None, description="parked or cold; null: the launcher parks no agents.")
    why: str | None = Field(None, description="Of a cold start.")


class Training(Message):
    """Sent by rank 0 when all ranks are restored and training begins, after ``base.json`` was synced."""

    kind: Literal["training"] = "training"
    rank: int
    at: str
    base: Base
    total_steps: int | None = None


class Resumed(Message):
    kind: Literal["resumed"] = "resumed"
    rank: int
    at: str
    report: ResumeReport


class Metrics(Message):
    kind: Literal["metrics"] = "metrics"
    rank: int
    at: str
    step: int
    values: dict[str, float]


class Progress(Message):
    kind: Literal["progress"] = "progress"
    rank: int
    at: str
    step: int
    total_steps: int | None = None
    data_epoch: int | None = None
    steps_per_second: float | None = Field(None, description="Mean since the previous report, saves included.")


class RedoneSteps(Message):
    """Sent by a rank that does steps of an earlier attempt again. ``steps``: the number of these steps. ``compared``: how many of
    them the rank has compared with the earlier fingerprints (see ``Redone``). ``steps`` and ``reason`` are the same on all ranks.
    A newer message of a rank replaces its previous one."""

    kind: Literal["redone"] = "redone"
    rank: int
    at: str
    world_size: int
    steps: int
    compared: int
    equal: int
    first_difference: StepDifference | None = None
    reason: str | None = None


class StepTimes(Message):
    """Medians over a rank's steps since its last report, in seconds from the start of a step, by the clock of its host."""

    ready: float = Field(ge=0, le=1e9, description="To the hook's call for the first bucket of gradients.")
    step: float = Field(ge=0, le=1e9, description="To the end of the step.")


class HookState(Message):
    kind: Literal["hook"] = "hook"
    rank: int
    at: str
    summary: HookSummary
    times: StepTimes | None = None


class CheckpointCommitted(Message):
    kind: Literal["checkpoint"] = "checkpoint"
    rank: int
    at: str
    step: int
    attempt: int
    digest: str
    size: int
    files: int
    seconds: float = Field(description="From the step boundary to the manifest's sync.")
    stall: float | None = Field(None, description="Seconds of these in which rank 0's training loop was blocked.")
    reason: Literal["schedule", "stop", "request", "end", "first", "memory"]
    parent: Base
    finished: bool = False


class CheckpointUploaded(Message):
    """Sent by the agent: the checkpoint's copy in the object store is complete, with its manifest. ``seconds`` and ``nbytes``:
    of the upload."""

    kind: Literal["checkpoint_uploaded"] = "checkpoint_uploaded"
    rank: int
    at: str
    step: int
    attempt: int
    digest: str
    uri: str = Field(description="URI of the checkpoint's prefix, without credentials.")
    seconds: float
    nbytes: int


class CheckpointFailed(Message):
    kind: Literal["checkpoint_failed"] = "checkpoint_failed"
    rank: int
    at: str
    step: int
    error: str


class CheckpointDeleted(Message):
    kind: Literal["checkpoint_deleted"] = "checkpoint_deleted"
    rank: int
    at: str
    step: int
    attempt: int


class Quarantined(Message):
    kind: Literal["quarantined"] = "quarantined"
    rank: int
    at: str
    step: int
    attempt: int
    error: str


AlertLevel = Literal["info", "warning", "error"]


class Alert(Message):
    """What a training script sends by ``Session.alert``. ``step``: the open step, counted from 1."""

    kind: Literal["alert"] = "alert"
    rank: int
    at: str
    step: int
    title: str = Field(min_length=1, max_length=200)
    text: str = Field("", max_length=1000)
    level: AlertLevel = "info"

    @property
    def line(self) -> str:
        """Title and text."""
        return f"{self.title}: {self.text}" if self.text else self.title


class Note(Message):
    """A text for the job's history, such as a warning, that has no message class of its own. It becomes an event of the type
    ``note.TYPE``. ``type``: this ``TYPE``, a short word in kebab-case."""

    kind: Literal["note"] = "note"
    rank: int
    at: str
    type: str = Field(max_length=64)
    message: str = Field(max_length=4000)
    data: dict[str, Any] = {}


RankMessage = Annotated[
    Started | Training | Resumed | Metrics | Progress | RedoneSteps | HookState | CheckpointCommitted | CheckpointUploaded
    | CheckpointFailed | CheckpointDeleted | Quarantined | Alert | Note,
    Field(discriminator="kind"),
]  # fmt: skip


class RankResult(Message):
    """How a rank ended; written by the rank, by rename, before it exits. ``traceback``: that of the exception that
    made a job's rank fail (for arguments that the script refused, the message), cut to its last 16384 characters; else None."""

    rank: int
    cause: Cause
    at: str
    last_step: int
    message: str | None = None
    traceback: str | None = None


class RankEnd(Message):
    """What the agent saw of one rank's end. ``exit_code``: negative is ``-signal``; None: the agent killed the rank.
    ``result``: what the rank itself wrote, None if nothing."""

    rank: int
    exit_code: int | None
    last_step: int
    result: RankResult | None = None


class AttemptResult(Message):
    """Content of ``result.json``: the authoritative record of how an attempt ended on this node."""

    protocol: int = PROTOCOL_VERSION
    job_id: str
    attempt: int
    node: int = 0
    cause: Cause
    rank: int | None = Field(None, description="The rank that caused the end.")
    exit_code: int | None = None
    message: str | None = None
    last_step: int
    base: Base | None = None
    secondary: bool = Field(False, description="This node's ranks were ended because another node's had failed.")
    began_at: float | None = Field(
        None, description="Unix seconds of this clock: when the failure that ended the node's ranks began."
    )
    started_at: str
    stop_at: str | None = Field(None, description="When this node's agent received the stop request.")
    ended_at: str
    ranks: list[RankEnd]
    pace: Pace | None = Field(None, description="The job's pace as measured by this node's ranks.")


# --- agent -> service --------------------------------------------------------------------------------------------------


class RankBatch(Message):
    """Consecutive lines of one rank's spool. ``from_seq``: sequence number of the first line, counted from 1."""

    rank: int
    from_seq: int = Field(ge=1)
    messages: list[RankMessage] = Field(max_length=1000)


class AgentReport(Message):
    protocol: int = PROTOCOL_VERSION
    job_id: str
    attempt: int
    node: int = 0
    phase: AttemptPhase
    last_step: int = 0
    batches: list[RankBatch] = []
    result: AttemptResult | None = None
    address: str | None = Field(
        None,
        description="host:port of this node; node 0's is the rendezvous address of all ranks (port 0: no listener).",
    )


class Group(Message):
    """The nodes of a multi-node attempt whose agents have reported. No ranks are started before all nodes are present."""

    present: list[int]
    rendezvous: str | None = Field(None, description="host:port that node 0's agent listens on.")


class ReportAck(Message):
    """The service's response to a report. ``acked``: per rank the highest sequence number that is stored; ``control``: what
    the agent must do."""

    protocol: int = PROTOCOL_VERSION
    acked: dict[int, int]
    control: Control
    group: Group | None = Field(None, description="null for a job of one node.")


class ControlNews(Message):
    """The service's answer to an agent that has waited for other requests than those in its last ``ReportAck``."""

    changed: bool = Field(description="True: the requests have changed, so the agent reports at once.")
