"""One tree of errors, each with a stable ``code``; only the HTTP layer maps a code to a status.

RatchetError
├── SpecError            a job spec that cannot be honoured, or another invalid body; field errors with JSON pointers
├── NotFound             what is named does not exist: a job, checkpoint, file, quota ...
├── Conflict             not possible in the present state: the job's phase, a stale attempt, a used-up quota ...
├── Refused              for another reason: too large, busy, missing token, reused idempotency key ...
├── CheckpointError      damaged, incomplete or missing checkpoint data
├── StateError           a state that cannot be captured or restored; names the key
└── WorkerError          an error that a rank reports about itself
    └── UserError        the user's code or spec is wrong; a retry cannot help
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict


class FieldProblem(BaseModel):
    """One wrong field of a request's body: its JSON pointer (``/hook/start_powerSGD_iter``), a stable code and a sentence."""

    model_config = ConfigDict(extra="forbid")

    pointer: str
    code: str
    detail: str


class Problem(BaseModel):
    """Body of an error response, RFC 9457 ``application/problem+json``. A published ``code`` never changes."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str | None = None
    errors: list[FieldProblem] = []


class RatchetError(Exception):
    """Base of all errors that a user may see. ``detail`` describes the problem and what to do next."""

    code: str = "error"

    def __init__(self, detail: str, *, code: str | None = None, errors: list[FieldProblem] | None = None, **extra: Any):
        super().__init__(detail)
        self.detail = detail
        if code is not None:
            self.code = code
        self.errors = errors or []
        self.extra = extra


class SpecError(RatchetError):
    """A job's spec or another request is invalid, or the job cannot be run. ``errors`` has the wrong fields; it is empty if no
    single field is wrong, for instance at invalid YAML. ``parse_spec`` reports at most 50 fields."""

    code = "invalid-spec"

    def __str__(self) -> str:
        """Return the number of ``errors`` and a line for each, or ``detail`` if there are fewer than two. ``detail`` describes
        the first only."""
        if len(self.errors) < 2:
            return self.detail
        each = (f"  {wrong.pointer or '/'}: {wrong.detail} [{wrong.code}]" for wrong in self.errors)
        return "\n".join([f"{len(self.errors)} mistakes:", *each])


class NotFound(RatchetError):
    """What was named does not exist, such as a job, attempt, checkpoint, file, hook, quota or token."""

    code = "not-found"


class Conflict(RatchetError):
    """The request is not possible in the present state. Examples: the job's phase does not allow it, a concurrent request came
    first, a quota is used up."""

    code = "conflict"


class Refused(RatchetError):
    """The request is not allowed, too large or invalid. Examples: a missing token, a role without the permission, a wrong
    setting."""

    code = "refused"


class CheckpointError(RatchetError):
    """Checkpoint data cannot be read, written or used; ``code`` states why. ``ratchet_store.filesystem.durable_io`` describes
    the codes of files on a local disk."""

    code = "checkpoint-damaged"


class StateError(RatchetError):
    """A state cannot be saved or restored; ``detail`` names the key."""

    code = "state-not-encodable"


class WorkerError(RatchetError):
    """An error that a rank reports about itself."""

    code = "worker-error"


class UserError(WorkerError):
    """The user's code or spec is wrong, so that a retry cannot help: a wrong entrypoint, an import error, a spec that the
    worker's machine cannot run. The rank ends with exit code 78."""

    code = "user-error"


PROBLEM_TYPE_PREFIX: Final = "urn:ratchet:problem:"
