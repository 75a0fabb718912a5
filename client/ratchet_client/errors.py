"""What a call may raise, beside the classes of ``ratchet_contract.errors`` that the service's problems become.

RatchetError
├── (SpecError, NotFound, Conflict, Refused, ...)   4xx, rebuilt from problem+json with code and field errors
├── ServiceUnreachable                              nothing answers
├── ServiceFault                                    the service answered 5xx, or something that is not its API
└── DeadlineReached                                 ``wait`` gave up; the job goes on
"""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from ratchet_contract.errors import Conflict, NotFound, Problem, RatchetError, Refused, SpecError


class ServiceUnreachable(RatchetError):
    code = "service-unreachable"


class ServiceFault(RatchetError):
    code = "service-fault"


class DeadlineReached(RatchetError):
    code = "deadline-reached"


_BY_STATUS: dict[int, type[RatchetError]] = {404: NotFound, 409: Conflict}
_SPEC_CODES = frozenset({"invalid-spec", "invalid-yaml", "invalid-value", "invalid-body"})


def error_of(response: httpx.Response) -> RatchetError:
    """The exception for a 4xx or 5xx answer. Its ``extra`` holds ``status`` (int) and ``request_id`` where known."""
    status = response.status_code
    problem = _problem(response)
    if problem is None:
        text = f"{response.request.method} {response.request.url} answered {status} without a problem document; "
        return ServiceFault(text + "is this the address of a Ratchet service?", status=status)
    return _class_of(status, problem)(problem.detail, code=problem.code, errors=problem.errors, status=status)


def _problem(response: httpx.Response) -> Problem | None:
    try:
        return Problem.model_validate(response.json())
    except (ValidationError, ValueError):
        return None


def _class_of(status: int, problem: Problem) -> type[RatchetError]:
    if problem.code in _SPEC_CODES:
        return SpecError
    if status >= 500:
        return ServiceFault
    return _BY_STATUS.get(status, Refused)
