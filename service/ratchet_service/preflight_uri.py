"""Pre-flight of ``checkpoint.uri``: the store is there, lets us write, and refuses a second writer. Asked with a deadline, since
a request waits for the answer.

Refused where the service itself has no access: it deletes, fetches and forks what lies there, and a job whose checkpoints cannot
be written would find that out on a GPU.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from ratchet_contract.errors import CheckpointError
from ratchet_contract.spec import JobSpec
from ratchet_service.preflight_report import Report
from ratchet_store.objects import BRIEF, DENIED, NO_CLIENT, ObjectStore, open_store

SECONDS: Final = 8.0
_POINTER: Final = "/checkpoint/uri"
_CODES: Final = {NO_CLIENT: "uri-no-client", DENIED: "uri-denied"}


class _Fault(NamedTuple):
    code: str
    text: str


def check(spec: JobSpec, report: Report, seconds: float = SECONDS) -> None:
    """Put a small object twice below the prefix, which must fail the second time, and delete it again."""
    uri = spec.checkpoint.uri
    if uri is None:
        return
    late = _Fault("uri-not-reached", f"{uri} did not answer within {seconds:g} s: {_LOOK}")
    fault = _within(seconds, lambda: _fault(uri), late)
    if fault is not None:
        report.refuse(_POINTER, fault.code, fault.text)


_LOOK: Final = "look at the endpoint (AWS_ENDPOINT_URL) and the network of the service"


def _fault(uri: str) -> _Fault | None:
    try:
        return _probe(open_store(uri, patience=BRIEF), f".ratchet-probe-{secrets.token_hex(8)}")
    except CheckpointError as error:
        code = _CODES.get(error.code, "uri-not-reached")
        return _Fault(code, error.detail if code in _CODES.values() else f"{error.detail}: {_LOOK}")


def _probe(store: ObjectStore, name: str) -> _Fault | None:
    first = store.put_if_absent(name, b"Ratchet looks whether a second writer is refused; delete this.\n")
    second = store.put_if_absent(name, b"a second writer")
    store.delete([name])
    if first and not second:
        return None
    text = (
        f"{store.where} takes a second object of the same name (If-None-Match is not honoured), so two attempts could not be "
        "kept apart: use a store that honours it; of S3-compatible ones that is AWS, MinIO, Ceph since Squid and others"
    )
    return _Fault("uri-no-put-if-absent", text)


def _within(seconds: float, ask: Callable[[], _Fault | None], late: _Fault) -> _Fault | None:
    """The answer of ``ask``, or ``late``; then nobody waits for it any more."""
    answers: list[_Fault | None] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), name="probe", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else late
