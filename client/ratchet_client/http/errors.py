"""The errors that a call may raise, in addition to the classes of ``ratchet_contract.errors`` for the service's problems.

RatchetError
├── (SpecError, NotFound, Conflict, Refused, ...)   4xx, or raised by the client itself
├── ServiceUnreachable                              no response, or no address
├── ServiceFault                                    a 5xx response, one that is not from the API, or a damaged download
├── AmbiguousName                                   several jobs have the name
└── DeadlineReached                                 a time limit has passed, as in ``wait``; no job is stopped
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from ratchet_contract.errors import Conflict, NotFound, Problem, RatchetError, Refused, SpecError

if TYPE_CHECKING:
    import httpx


NOT_A_SERVICE: Final = "not-a-service"
"""Code of the ``ServiceFault`` for a response from another program, for which retries are useless."""


class ServiceUnreachable(RatchetError):
    """The service does not respond, the connection broke, or ``service.json`` has no usable address."""

    code = "service-unreachable"


class ServiceFault(RatchetError):
    """The service responded with a 5xx status, the response is not from Ratchet's API, or a download is damaged."""

    code = "service-fault"


class AmbiguousName(RatchetError):
    """Several jobs have the requested name. ``extra["jobs"]`` is the list of these jobs, newest first."""

    code = "ambiguous-name"


class DeadlineReached(RatchetError):
    """A time limit has passed, such as the ``deadline`` of ``wait`` or ``poll``. No job is stopped by it."""

    code = "deadline-reached"


_BY_STATUS: dict[int, type[RatchetError]] = {404: NotFound, 409: Conflict}
_SPEC_CODES = frozenset({"invalid-spec", "invalid-yaml", "invalid-value", "invalid-body"})


def error_from_response(response: httpx.Response) -> RatchetError:
    """Return the exception for a response that is not a success: by its problem document, or ``ServiceFault`` without one. Its
    ``extra`` has ``status`` (int)."""
    status = response.status_code
    problem = _problem(response)
    if problem is None:
        return _no_upstream(response) if status in (502, 503, 504) else no_service(response)
    return _class_of(status, problem)(problem.detail, code=problem.code, errors=problem.errors, status=status)


def no_service(response: httpx.Response) -> ServiceFault:
    """Return, and do not raise, the ``ServiceFault`` for a response that is not from Ratchet's API, with the code
    ``NOT_A_SERVICE``."""
    url = response.request.url
    https = ", or does it want https://?" if url.scheme == "http" and response.status_code == 400 else ""
    lacks = "a protocol's number" if response.is_success else "a problem document"
    return ServiceFault(
        f"{_address(response)} is not a Ratchet service: {response.request.method} {url.path} answered {response.status_code} "
        f"without {lacks}{https}. Another program listens there: check --server and RATCHET_SERVER (`ratchet serve` prints its "
        "address when it starts)",
        code=NOT_A_SERVICE,
        status=response.status_code,
    )


def _no_upstream(response: httpx.Response) -> ServiceFault:
    """Return, and do not raise, the ``ServiceFault`` for the response of a proxy without a service behind it."""
    status = response.status_code
    return ServiceFault(
        f"{_address(response)} answers {status}: a proxy there gets no response from the service. Check that the service runs "
        "(`ratchet serve`), and that the proxy has its address",
        status=status,
    )


def _address(response: httpx.Response) -> str:
    """Return the address of the server that sent the response."""
    return str(response.request.url.copy_with(path="/", query=None)).rstrip("/")


def _problem(response: httpx.Response) -> Problem | None:
    """Return the problem document (RFC 9457) in the response; None if there is none."""
    try:
        return Problem.model_validate(response.json())
    except (ValidationError, ValueError):
        return None


def _class_of(status: int, problem: Problem) -> type[RatchetError]:
    """Return the exception class for a problem, by its code and HTTP status."""
    if problem.code in _SPEC_CODES:
        return SpecError
    if status >= 500:
        return ServiceFault
    return _BY_STATUS.get(status, Refused)
