"""Pre-flight of ``checkpoint.uri``: the store exists, accepts writes from the service, and refuses a second writer."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from ratchet_contract.errors import CheckpointError
from ratchet_contract.spec.job import JobSpec
from ratchet_service.preflight.report import Report
from ratchet_store.object_store.client import BRIEF, DENIED, NO_CLIENT, ObjectStore, open_store

TIMEOUT_SECONDS: Final = 8.0
_POINTER: Final = "/checkpoint/uri"
_CODES: Final = {NO_CLIENT: "uri-no-client", DENIED: "uri-denied"}


class _Fault(NamedTuple):
    """Code and text of a problem with the object store."""

    code: str
    text: str


def check(spec: JobSpec, report: Report, seconds: float = TIMEOUT_SECONDS) -> None:
    """Add to ``report`` the fault of the object store ``checkpoint.uri``, if any. Writes a small object there and, if it can,
    deletes it. Blocks for at most ``seconds``."""
    uri = spec.checkpoint.uri
    if uri is None:
        return
    late = _Fault("uri-not-reached", f"{uri} did not answer within {seconds:g} s: {_ADVICE}")
    fault = _with_deadline(seconds, lambda: _find_fault(uri), late)
    if fault is not None:
        report.refuse(_POINTER, fault.code, fault.text)


_ADVICE: Final = "check the endpoint (AWS_ENDPOINT_URL) and the network of the service"


def _find_fault(uri: str) -> _Fault | None:
    """Return the fault of the object store; None if it can be used."""
    try:
        return _probe(open_store(uri, patience=BRIEF), f".ratchet-probe-{secrets.token_hex(8)}")
    except CheckpointError as error:
        code = _CODES.get(error.code, "uri-not-reached")
        return _Fault(code, error.detail if code in _CODES.values() else f"{error.detail}: {_ADVICE}")


def _probe(store: ObjectStore, name: str) -> _Fault | None:
    """Check that the store refuses to overwrite an object: write the object ``name`` twice, each time only if it is absent, and
    delete it. Return a fault unless the first write succeeds and the second is refused. Raises ``CheckpointError``."""
    first = store.put_if_absent(name, b"Ratchet looks whether a second writer is refused; delete this.\n")
    second = store.put_if_absent(name, b"a second writer")
    store.delete([name])
    if first and not second:
        return None
    text = (
        f"{store.url} accepts a second object of the same name (If-None-Match is not honoured), so two attempts could "
        "overwrite each other's objects: use a store that honours it; among S3-compatible ones AWS, MinIO, Ceph since Squid "
        "and others"
    )
    return _Fault("uri-no-put-if-absent", text)


def _with_deadline(seconds: float, probe: Callable[[], _Fault | None], timeout_fault: _Fault) -> _Fault | None:
    """Run ``probe`` on a thread and return its result or raise its error; return ``timeout_fault`` if it still runs after
    ``seconds``."""
    answer: Future[_Fault | None] = Future()

    def run() -> None:
        try:
            answer.set_result(probe())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="probe", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        return answer.result() if answer.done() else timeout_fault  # the probe may have raised a TimeoutError itself
