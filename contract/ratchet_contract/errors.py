"""Errors for the user, each with a stable ``code``. ``RatchetError`` is their base."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict


class FieldProblem(BaseModel):
    """One wrong field of a request's body, or one wrong parameter. ``pointer``: a JSON pointer, such as
    ``/hook/start_powerSGD_iter``. ``code``: a stable code. ``detail``: a sentence that describes the problem."""

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
    """Base of the errors for the user. ``detail`` describes the problem and usually what to do next."""

    code: str = "error"

    def __init__(self, detail: str, *, code: str | None = None, errors: list[FieldProblem] | None = None, **extra: Any):
        super().__init__(detail)
        self.detail = detail
        if code is not None:
            self.code = code
        self.errors = errors or []
        self.extra = extra


class SpecError(RatchetError):
    """A job's spec or another request is invalid, or the job cannot be run. ``errors`` has the wrong fields, if any."""

    code = "invalid-spec"

    def __str__(self) -> str:
        """Return ``detail``; with several ``errors``, their number and a line for each instead."""
        if len(self.errors) < 2:
            return self.detail
        each = (f"  {wrong.pointer or '/'}: {wrong.detail} [{wrong.code}]" for wrong in self.errors)
        return "\n".join([f"{len(self.errors)} mistakes:", *each])


class NotFound(RatchetError):
    """The named object does not exist, for example a job, attempt, checkpoint, file, hook, quota or token."""

    code = "not-found"


class Conflict(RatchetError):
    """The request is not possible in the present state, for example the job's phase or a used-up quota."""

    code = "conflict"


class Refused(RatchetError):
    """The request is not allowed, too large or invalid, for example without a token or with a wrong setting."""

    code = "refused"


class CheckpointError(RatchetError):
    """Checkpoint data cannot be read, written or used; ``code`` states why."""

    code = "checkpoint-damaged"


class StateError(RatchetError):
    """A state cannot be saved, restored or exported; ``detail`` says why."""

    code = "state-not-encodable"


class WorkerError(RatchetError):
    """An error that a rank or an agent reports about itself."""

    code = "worker-error"


class UserError(WorkerError):
    """The user's code or spec is wrong, so that a retry cannot help. A rank of a job ends with exit code 78."""

    code = "user-error"


PROBLEM_TYPE_PREFIX: Final = "urn:ratchet:problem:"
