"""What a call may raise, beside the classes of ``ratchet_contract.errors`` that the service's problems become.

RatchetError
├── (SpecError, NotFound, Conflict, Refused, ...)   4xx, rebuilt from problem+json with code and field errors
├── ServiceUnreachable                              nothing answers
├── ServiceFault                                    the service answered 5xx, or something that is not its API
├── AmbiguousName                                   a name that several jobs have
└── DeadlineReached                                 ``wait`` gave up; the job goes on
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from ratchet_contract.errors import Conflict, NotFound, Problem, RatchetError, Refused, SpecError

if TYPE_CHECKING:
    import httpx


NOT_A_SERVICE: Final = "not-a-service"
"""Code of the ``ServiceFault`` for an answer of another program: waiting does not make it one."""


class ServiceUnreachable(RatchetError):
    """Nothing answers, or no service was found."""

    code = "service-unreachable"


class ServiceFault(RatchetError):
    """The service answered 5xx, or something that is not its API."""

    code = "service-fault"


class AmbiguousName(RatchetError):
    """Several jobs have the name that one was asked for by. ``extra["jobs"]`` has them, newest first."""

    code = "ambiguous-name"


class DeadlineReached(RatchetError):
    """``wait`` or ``poll`` gave up after its ``deadline``; the job goes on."""

    code = "deadline-reached"


_BY_STATUS: dict[int, type[RatchetError]] = {404: NotFound, 409: Conflict}
_SPEC_CODES = frozenset({"invalid-spec", "invalid-yaml", "invalid-value", "invalid-body"})


def error_of(response: httpx.Response) -> RatchetError:
    """The exception for a 4xx or 5xx answer. Its ``extra`` holds ``status`` (int) and ``request_id`` where known."""
    status = response.status_code
    problem = _problem(response)
    if problem is None:
        return no_service(response)
    return _class_of(status, problem)(problem.detail, code=problem.code, errors=problem.errors, status=status)


def no_service(response: httpx.Response) -> ServiceFault:
    """For an answer that is not the API's."""
    url = response.request.url
    address = str(url.copy_with(path="/", query=None)).rstrip("/")
    https = ", or does it want https://?" if url.scheme == "http" and response.status_code == 400 else ""
    lacks = "a protocol's number" if response.is_success else "a problem document"
    return ServiceFault(
        f"{address} is not a Ratchet service: {response.request.method} {url.path} answered {response.status_code} without "
        f"{lacks}{https}. Another program listens there: check --server and RATCHET_SERVER (`ratchet serve` says its "
        "address when it starts)",
        code=NOT_A_SERVICE,
        status=response.status_code,
    )


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
