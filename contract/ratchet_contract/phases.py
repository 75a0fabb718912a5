"""Phases of jobs and attempts, causes of an attempt's end, reasons of a job, types of events, and the table of phase
transitions."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class JobPhase(StrEnum):
    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUSPENDED = "SUSPENDED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        """True if the job has ended: SUCCEEDED, FAILED or CANCELLED."""
        return self in (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED)

    @property
    def active(self) -> bool:
        """True if the job has an attempt that may be alive: STARTING, RUNNING or STOPPING."""
        return self in (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING)


class Desired(StrEnum):
    """The desired state of a job, set by API requests and by the scheduler. It is level-triggered: it holds until it is changed.
    It is reset to ``run`` when the job has stopped as desired, or has ended in another way."""

    RUN = "run"
    SUSPEND = "suspend"
    CANCEL = "cancel"
    PREEMPT = "preempt"


class AttemptPhase(StrEnum):
    LAUNCHING = "LAUNCHING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


class Outcome(StrEnum):
    SUCCEEDED = "succeeded"
    PREEMPTED = "preempted"
    SUSPENDED = "suspended"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LOST = "lost"


class Budget(StrEnum):
    NONE = "none"
    PREEMPTIONS = "max_preemptions"
    FAILURES = "max_failures"
    FATAL = "fatal"  # ends the job at once


class Cause(StrEnum):
    """Why an attempt ended. Each cause has one outcome, and one budget that the attempt counts against."""

    COMPLETED = "completed"
    API_PREEMPT = "api-preempt"
    SIGTERM = "sigterm"
    HIGHER_PRIORITY = "higher-priority"
    NODE_LOST = "node-lost"
    EVICTED = "evicted"
    TIME_LIMIT = "time-limit"
    UPGRADE = "upgrade"  # its agent or ranks use another protocol than the service that manages it now
    API_SUSPEND = "api-suspend"
    API_CANCEL = "api-cancel"
    EXCEPTION = "exception"
    RANK_KILLED = "rank-killed"
    OOM = "oom"
    HANG = "hang"
    CHECKPOINT_ERROR = "checkpoint-error"
    USER_ERROR = "user-error"
    TIMEOUT = "timeout"  # policy.timeout of the job reached
    LEASE_LOST = "lease-lost"
    LAUNCHER_ERROR = "launcher-error"
    UNKNOWN = "unknown"

    @property
    def outcome(self) -> Outcome:
        return _OUTCOMES[self][0]

    @property
    def budget(self) -> Budget:
        return _OUTCOMES[self][1]

    @property
    def is_failure(self) -> bool:
        """True if an attempt that ended for this cause failed or was lost."""
        return self.outcome in (Outcome.FAILED, Outcome.LOST)


_P, _F, _L = (Outcome.PREEMPTED, Budget.PREEMPTIONS), (Outcome.FAILED, Budget.FAILURES), (Outcome.LOST, Budget.FAILURES)
_OUTCOMES: Final[dict[Cause, tuple[Outcome, Budget]]] = {
    Cause.COMPLETED: (Outcome.SUCCEEDED, Budget.NONE),
    Cause.API_PREEMPT: _P, Cause.SIGTERM: _P, Cause.HIGHER_PRIORITY: _P, Cause.NODE_LOST: _P, Cause.EVICTED: _P,
    Cause.TIME_LIMIT: _P, Cause.UPGRADE: (Outcome.PREEMPTED, Budget.NONE),
    Cause.API_SUSPEND: (Outcome.SUSPENDED, Budget.NONE),
    Cause.API_CANCEL: (Outcome.CANCELLED, Budget.NONE),
    Cause.EXCEPTION: _F, Cause.RANK_KILLED: _F, Cause.OOM: _F, Cause.HANG: _F, Cause.CHECKPOINT_ERROR: _F,
    Cause.USER_ERROR: (Outcome.FAILED, Budget.FATAL),
    Cause.TIMEOUT: (Outcome.FAILED, Budget.FATAL),
    Cause.LEASE_LOST: _L, Cause.LAUNCHER_ERROR: _L, Cause.UNKNOWN: _L,
}  # fmt: skip

CAUSE_PRECEDENCE: Final[tuple[Cause, ...]] = (
    Cause.USER_ERROR, Cause.LEASE_LOST, Cause.OOM, Cause.HANG, Cause.CHECKPOINT_ERROR, Cause.EXCEPTION, Cause.RANK_KILLED,
    Cause.TIMEOUT, Cause.API_CANCEL, Cause.API_SUSPEND, Cause.API_PREEMPT, Cause.HIGHER_PRIORITY, Cause.UPGRADE, Cause.SIGTERM,
    Cause.EVICTED, Cause.TIME_LIMIT, Cause.NODE_LOST, Cause.LAUNCHER_ERROR, Cause.UNKNOWN, Cause.COMPLETED,
)  # fmt: skip
"""Several results of one attempt become one cause: the first of this list that occurs. The agent applies it only to results from
before the group was torn down: survivors of a killed rank see broken connections, which are not the cause."""


class Reason(StrEnum):
    """Why a job waits or has ended, other than by the cause of an attempt's end: ``JobReason`` has both."""

    NO_SLOT = "no-slot"
    QUOTA = "quota"  # of the job's owner
    NO_LAUNCHER = "no-launcher"  # no running reconciler has the job's launcher
    ENGINE_QUEUE = "engine-queue"  # it waits in the engine's queue, or until the engine can accept it
    ENGINE_UNREACHABLE = "engine-unreachable"
    RECONCILE_ERROR = "reconcile-error"  # its attempt cannot be supervised
    ATTEMPT_ENDING = "attempt-ending"  # its attempt is proved dead; the finalisation takes long or waits for others
    BACKOFF = "backoff"
    DISK_FULL = "disk-full"  # of the service's database, so no row has this reason
    NO_PROGRESS = "no-progress"
    SAME_ERROR = "same-error"  # two attempts in a row failed in the same way before their first step
    EXIT_CODE = "exit-code"  # a rule of policy.exit_codes ended it
    MAX_FAILURES = "max-failures"
    MAX_PREEMPTIONS = "max-preemptions"
    SPEC_UNREADABLE = "spec-unreadable"  # another version stored its spec


JobReason = Reason | Cause
"""What a job's row may have as its reason. A row that a newer version wrote may have another text."""


class Event(StrEnum):
    """The possible events of a job: API actions, the launch, the beginning of training, and ends."""

    SUSPEND = "suspend"
    RESUME = "resume"
    CANCEL = "cancel"
    PREEMPT = "preempt"
    CHECKPOINT = "checkpoint"
    PATCH = "patch"
    DELETE = "delete"
    FORK = "fork"
    LAUNCH = "launch"  # an attempt row was made and passed to the launcher
    TRAINING = "training"  # the group has begun to train
    END_SUCCEEDED = "end-succeeded"
    END_SUSPENDED = "end-suspended"
    END_CANCELLED = "end-cancelled"
    END_REQUEUE = "end-requeue"
    END_FAILED = "end-failed"


class EventType(StrEnum):
    """Types of events in a job's history. The history also has the job's transitions (``Event``), and notes
    (``NoteType``). A newer version may have written other types."""

    SUBMITTED = "submitted"
    ADOPTED = "adopted"  # a run without a service became this job
    FORKED = "forked"  # in the history of the job that was forked
    FORKED_FROM = "forked-from"  # in the history of the fork
    PATCHED = "patched"
    CODE_CHANGED = "code-changed"
    HOOK_CHANGED = "hook-changed"
    WORLD_CHANGED = "world-changed"
    POLICY_CHANGED = "policy-changed"  # policy.on_hook_mismatch

    RANK_STARTED = "rank-started"
    RESUMED = "resumed"  # state restored, or started at step 0
    ALERT = "alert"  # of the training script
    REPLAY_DIFFERENCE = "replay-difference"  # the attempt's first step whose replay gave a different result
    RESULT = "result"  # a node's agent has ended
    ATTEMPT_ENDED = "attempt-ended"
    NODE_EXCLUDED = "node-excluded"  # this attempt and the following ones stay away from it for some time
    STRAGGLER = "straggler"  # a rank that the others wait for at each step
    ATTEMPT_FOUND = "attempt-found"  # on the disk and not in the database, after a backup was restored
    STALE_REQUEST = "stale-request"  # from an attempt that is over

    AGENT_STOPPED = "agent-stopped"  # written before the SIGTERM
    AGENT_KILLED = "agent-killed"  # written before the kill
    AGENT_LEFT = "agent-left"  # a script without a Session under another protocol runs to its end
    NOT_PROVED_DEAD = "not-proved-dead"  # some time after the kill, a part of the attempt is still alive
    ENGINE_UNREACHABLE = "engine-unreachable"
    RECONCILE_ERROR = "reconcile-error"

    CHECKPOINT = "checkpoint"  # committed; ``Event.CHECKPOINT``, a request for one, has the same name
    CHECKPOINT_FAILED = "checkpoint-failed"
    CHECKPOINT_IGNORED = "checkpoint-ignored"
    CHECKPOINT_ADOPTED = "checkpoint-adopted"  # found on the disk, its report was lost
    CHECKPOINT_UPLOADED = "checkpoint-uploaded"
    CHECKPOINT_QUARANTINED = "checkpoint-quarantined"
    CHECKPOINT_NOT_QUARANTINED = "checkpoint-not-quarantined"
    CHECKPOINT_NOT_DELETED = "checkpoint-not-deleted"
    CHECKPOINTS_PRUNED = "checkpoints-pruned"
    VERIFIED = "verified"
    PINNED = "pinned"
    UNPINNED = "unpinned"

    LOGS_SHORTENED = "logs-shortened"
    METRICS_DROPPED = "metrics-dropped"
    NOTES_LEFT_OUT = "notes-left-out"  # from here on, the attempt's notes are only counted
    LEFT_OUT = "left-out"  # at the attempt's end: the numbers of notes and metric values that are not stored
    MESSAGE_DROPPED = "message-dropped"
    WEBHOOK_DISABLED = "webhook-disabled"  # an event of this job could not be delivered to it
    WEBHOOK_GAVE_UP = "webhook-gave-up"  # the same, but the webhook accepted other events
    TRACKER_FAILING = "tracker-failing"  # an experiment tracker has not accepted this job's values for a while
    TRACKER_BACK = "tracker-back"
    TRACKER_BRANCHED = "tracker-branched"  # a tracker gets a new run from here on


class NoteType(StrEnum):
    """Types of the notes that ranks and agents send for a job's history: a note of type ``TYPE`` becomes an event of type
    ``note.TYPE``. Apart from these types, ``hook-CODE`` reports a numeric problem of a hook."""

    # of checkpoints
    CHECKPOINT_WAITED = "checkpoint-waited"
    CHECKPOINT_SKIPPED = "checkpoint-skipped"
    CHECKPOINT_LATE = "checkpoint-late"  # no time was left for a save
    CHECKPOINT_INTERVAL = "checkpoint-interval"  # the one that every_steps: auto has found
    CHECKPOINT_NOT_NEEDED = "checkpoint-not-needed"
    CHECKPOINT_NOT_DELETED = "checkpoint-not-deleted"
    CHECKPOINT_FROM_MEMORY = "checkpoint-from-memory"
    MEMORY_COPY_FAILED = "memory-copy-failed"  # a step has no copy in memory
    MEMORY_COPIES_UNUSED = "memory-copies-unused"  # the newest copies cannot be used
    CHECKPOINT_FETCHED = "checkpoint-fetched"  # from the object store
    CHECKPOINT_ENTRY_LEFT_OUT = "checkpoint-entry-left-out"  # of a Lightning hook
    KEEP_BEST_UNKNOWN = "keep-best-unknown"
    FILE_SYSTEM = "file-system"  # trusted with a remark
    FILE_SYSTEM_NOT_TRIED = "file-system-not-tried"
    STAGING_BLOCKING = "staging-blocking"
    CHANGED_BEHIND_CHECKPOINT = "changed-behind-checkpoint"
    OBJECT_STORE = "object-store"
    UPLOAD_FAILED = "upload-failed"
    UPLOAD_INCOMPLETE = "upload-incomplete"

    # of repeated steps
    FINGERPRINTS_PARTIAL = "fingerprints-partial"
    FINGERPRINTS_UNAVAILABLE = "fingerprints-unavailable"

    # of training loops
    BATCHES_RENUMBERED = "batches-renumbered"
    UNREGISTERED = "unregistered"  # objects of the script that the Session does not know
    NO_SESSION = "no-session"
    SESSION_ARGUMENTS = "session-arguments"
    IGNORED_NOT_FOUND = "ignored-not-found"
    EVALUATION_ABANDONED = "evaluation-abandoned"
    TRIAL_ENDED = "trial-ended"
    LOOP_VARIABLES = "loop-variables"
    OTHER_TOTAL = "other-total"
    TRAINED_OUTSIDE_THE_LOADER = "trained-outside-the-loader"
    LOAD_STATE = "load-state"
    RESUME_FROM_CHECKPOINT = "resume-from-checkpoint"
    CSV_ROWS_LOST = "csv-rows-lost"
    DDP_TIMEOUT = "ddp-timeout"
    EVENT_FILES_UNKNOWN = "event-files-unknown"
    MLFLOW_VALUES_KEPT = "mlflow-values-kept"

    ENVIRONMENT = "environment"  # that is built or was built for the job's requirements

    # of dropped data
    LOG_SHORTENED = "log-shortened"
    LOGS_UNBOUNDED = "logs-unbounded"
    LOG_NOT_KEPT = "log-not-kept"
    WORK_KEPT = "work-kept"
    BAD_MESSAGE = "bad-message"  # takes the place of a message that cannot be read


class Step(NamedTuple):
    """A cell of the transition table. ``phase`` None: the event is refused with ``code``. ``desired`` None: no change."""

    phase: JobPhase | None
    desired: Desired | None = None
    code: str = ""
    reset_budgets: bool = False


_Q, _S, _R, _T = JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING
_Z, _OK, _KO, _CA = JobPhase.SUSPENDED, JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED
_NO = Step(None, code="wrong-phase")
_OVER = Step(None, code="job-ended")
_STALE = Step(None, code="not-running")


def _build_transitions() -> dict[JobPhase, dict[Event, Step]]:
    """Return the transition table: the step for every phase and event."""
    e, d = Event, Desired
    ends = {
        e.END_SUCCEEDED: Step(_OK, d.RUN), e.END_SUSPENDED: Step(_Z, d.RUN), e.END_CANCELLED: Step(_CA, d.RUN),
        e.END_REQUEUE: Step(_Q, d.RUN), e.END_FAILED: Step(_KO, d.RUN),
    }  # fmt: skip
    no_end = dict.fromkeys(ends, _STALE)

    def unchanged(p: JobPhase, delete: Step = _NO) -> dict[Event, Step]:
        """Return the steps of patch, fork and delete; patch and fork keep the phase ``p``."""
        return {e.PATCH: Step(p), e.FORK: Step(p), e.DELETE: delete}

    def active_row(p: JobPhase, training: Step) -> dict[Event, Step]:
        """Return the row for ``p``, which is STARTING or RUNNING; ``training``: the step when training begins."""
        return {
            e.SUSPEND: Step(_T, d.SUSPEND), e.RESUME: Step(p), e.CANCEL: Step(_T, d.CANCEL),
            e.PREEMPT: Step(_T, d.PREEMPT), e.CHECKPOINT: Step(p), e.LAUNCH: _NO, e.TRAINING: training, **unchanged(p), **ends,
        }  # fmt: skip

    def ended_row(p: JobPhase, resume: Step) -> dict[Event, Step]:
        """Return the table's row for a phase of an ended job; ``resume``: the step for a resume."""
        return {
            e.SUSPEND: _OVER, e.RESUME: resume, e.CANCEL: Step(p) if p is _CA else _OVER, e.PREEMPT: _OVER,
            e.CHECKPOINT: _OVER, e.LAUNCH: _OVER, e.TRAINING: _STALE, **unchanged(p, Step(p)), **no_end,
        }  # fmt: skip

    return {
        # FAILED and SUSPENDED straight from QUEUED happen when no attempt is alive: launch impossible, no-progress, suspend.
        _Q: {
            e.SUSPEND: Step(_Z, d.RUN), e.RESUME: Step(_Q), e.CANCEL: Step(_CA, d.RUN), e.PREEMPT: _STALE,
            e.CHECKPOINT: _STALE, e.LAUNCH: Step(_S), e.TRAINING: _STALE, **unchanged(_Q), **no_end,
            e.END_FAILED: Step(_KO, d.RUN),
        },
        _S: active_row(_S, Step(_R)),
        _R: active_row(_R, Step(_R)),
        _T: {
            # A stronger desired state replaces a weaker one: cancel > suspend > preempt; resume turns a suspend into
            # stop-and-requeue.
            e.SUSPEND: Step(_T, d.SUSPEND), e.RESUME: Step(_T, d.PREEMPT), e.CANCEL: Step(_T, d.CANCEL),
            e.PREEMPT: Step(_T), e.CHECKPOINT: _NO, e.LAUNCH: _NO, e.TRAINING: Step(_T), **unchanged(_T), **ends,
        },
        _Z: {
            e.SUSPEND: Step(_Z), e.RESUME: Step(_Q, d.RUN), e.CANCEL: Step(_CA, d.RUN), e.PREEMPT: _STALE,
            e.CHECKPOINT: _STALE, e.LAUNCH: _NO, e.TRAINING: _STALE, **unchanged(_Z), **no_end,
        },
        _OK: ended_row(_OK, _OVER),
        _KO: ended_row(_KO, Step(_Q, d.RUN, reset_budgets=True)),
        _CA: ended_row(_CA, Step(_Q, d.RUN, reset_budgets=True)),
    }  # fmt: skip


TRANSITIONS: Final[dict[JobPhase, dict[Event, Step]]] = _build_transitions()


def next_step(phase: JobPhase, event: Event, desired: Desired = Desired.RUN) -> Step:
    """Return the step for ``phase`` and ``event``. A job that stops for a cancel refuses suspend, resume and preempt."""
    if (
        phase is JobPhase.STOPPING
        and desired is Desired.CANCEL
        and event in (Event.SUSPEND, Event.RESUME, Event.PREEMPT)
    ):
        return Step(None, code="wrong-phase")
    return TRANSITIONS[phase][event]
