"""The client's errors. The public import path of ``ratchet_client.http.errors``."""

from ratchet_client.http.errors import (
    NOT_A_SERVICE,
    AmbiguousName,
    DeadlineReached,
    ServiceFault,
    ServiceUnreachable,
    error_from_response,
    no_service,
)

__all__ = [
    "NOT_A_SERVICE",
    "AmbiguousName",
    "DeadlineReached",
    "ServiceFault",
    "ServiceUnreachable",
    "error_from_response",
    "no_service",
]
