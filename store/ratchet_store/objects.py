"""An object store (S3 and what speaks like it, Google Cloud Storage, Azure) below one prefix, through obstore.

Credentials and endpoints come from the environment alone (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...), and no message
of this module has their values in it. Every request is repeated by obstore, with back-off and jitter, for what can heal (5xx,
time-outs, broken connections) within a bounded time. Not for ``memory://`` or ``file://``: only a caller that holds such a
store of obstore's itself can hand it in.

Codes of the ``CheckpointError`` raised here, beside those of ``files``:

``checkpoint-remote``         the store does not answer, or fails: nothing is proved about what it holds
``checkpoint-remote-denied``  the store answers and refuses: no or wrong credentials, no such bucket, no right to do it
``checkpoint-no-client``      the package obstore is not installed
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

from ratchet_contract.errors import CheckpointError
from ratchet_contract.spec_checkpoint import SCHEMES
from ratchet_store.files import MISSING

REMOTE: Final = "checkpoint-remote"
DENIED: Final = "checkpoint-remote-denied"
NO_CLIENT: Final = "checkpoint-no-client"

PART: Final = 16 << 20
"""Bytes of one part of a multipart upload. S3 takes 10,000 parts: 160 GB a rank file; larger ones get larger parts."""
MOST_PARTS: Final = 9_000
CONCURRENCY: Final = 2
"""Requests of one upload at a time: training has the network first."""
_TAG: Final = "ratchet-digest"
_SECRET: Final = re.compile(r"(KEY|SECRET|TOKEN|PASSWORD|SIGNATURE|CREDENTIAL|SAS)", re.ASCII)
_USER: Final = re.compile(r"//[^/\s@]+@", re.ASCII)
"""Of an endpoint that was given with a password in it."""
_PANICS: Final = "pyo3_runtime"
"""Module of what the client raises where it trips over itself, which is no ``Exception``."""
_PROVIDERS: Final = ("AWS_", "GOOGLE_", "AZURE_")
_LONGEST: Final = 600  # characters of what a store said


@dataclass(frozen=True)
class Patience:
    """Seconds. ``connect``: until a connection stands; ``request``: one try of one request, data included; ``retry``: from the
    first try until no further one is begun."""

    connect: float = 5.0
    request: float = 120.0
    retry: float = 60.0

    @property
    def client(self) -> dict[str, Any]:
        return {
            "connect_timeout": timedelta(seconds=self.connect),
            "timeout": timedelta(seconds=self.request),
        }

    @property
    def retries(self) -> dict[str, Any]:
        backoff = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2}
        return {"max_retries": 10, "retry_timeout": timedelta(seconds=self.retry), "backoff": backoff}


BRIEF: Final = Patience(2.0, 4.0, 3.0)
"""For somebody who waits for an answer."""


class Found(NamedTuple):
    """An object: its size in bytes, and the digest that it was put with (None: the store keeps none)."""

    size: int
    digest: str | None


class ObjectStore:
    """The objects below one prefix. Names are relative, with ``/``. Thread-safe. Every method raises ``CheckpointError``."""

    def __init__(self, raw: Any, where: str, *, digests: bool = True) -> None:
        """``raw``: a store of obstore's; ``where``: how messages name it; ``digests``: does it keep attributes?"""
        self._raw = raw
        self.where = where.rstrip("/")
        self._digests = digests

    def put(self, name: str, chunks: Iterable[bytes | memoryview], size: int, digest: str) -> None:
        """One object out of ``chunks``, whole or not at all, with ``digest`` beside it. What the iterable raises is raised."""
        import obstore

        attributes = {_TAG: digest} if self._digests else None
        with self._asking("put", name):
            if size <= PART:
                obstore.put(self._raw, name, b"".join(chunks), attributes=attributes, use_multipart=False)
            else:
                part = max(PART, -(-size // MOST_PARTS))
                obstore.put(
                    self._raw, name, iter(chunks), attributes=attributes, use_multipart=True, chunk_size=part,
                    max_concurrency=CONCURRENCY,
                )  # fmt: skip

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Put ``data``; False: an object of that name is there already, and stays as it is. Of several writers exactly one is
        told True, except that one whose answer was lost may hear False: look what is there."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._asking("put", name):
            try:
                obstore.put(self._raw, name, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def get(self, name: str, limit: int) -> bytes:
        """A small object, whole. Raises ``checkpoint-missing``; ``checkpoint-damaged`` when it has more than ``limit`` bytes."""
        found = self.head(name)
        if found.size > limit:
            raise CheckpointError(f"{self.where}/{name} has {found.size} bytes, more than the {limit} it may have")
        return bytes(self.get_range(name, 0, found.size)) if found.size else b""

    def get_range(self, name: str, begin: int, end: int) -> memoryview:
        """Bytes ``begin <= i < end``, in memory; fewer where the object is shorter."""
        import obstore

        with self._asking("get", name):
            return memoryview(obstore.get_range(self._raw, name, start=begin, end=end))

    def head(self, name: str) -> Found:
        """Raises ``checkpoint-missing``."""
        import obstore

        with self._asking("head", name):
            result = obstore.get(self._raw, name, options={"head": True})
            return Found(int(result.meta["size"]), result.attributes.get(_TAG))

    def list(self, prefix: str = "") -> dict[str, int]:
        """Size by name of all objects below ``prefix`` (which ends at a ``/``)."""
        import obstore

        with self._asking("list", prefix):
            batches = obstore.list(self._raw, prefix=prefix or None)
            return {str(meta["path"]): int(meta["size"]) for batch in batches for meta in batch}

    def delete(self, names: Iterable[str]) -> None:
        """Those that are not there are fine. Returns after all are gone; the order among them is not told."""
        import obstore

        wanted = list(names)
        with self._asking("delete", ", ".join(wanted[:3])):
            try:
                if wanted:
                    obstore.delete(self._raw, wanted)
            except FileNotFoundError:  # of a local directory, which stops there
                for name in wanted:
                    _delete_one(self._raw, name)

    @contextmanager
    def _asking(self, verb: str, name: str) -> Iterator[None]:
        """What obstore raises becomes ``CheckpointError``."""
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        what = f"{verb} {self.where}/{name}"
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise CheckpointError(f"{what}: there is no such bucket: {_said(error)}", code=DENIED) from None
            raise CheckpointError(f"{what}: there is no such object", code=MISSING) from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise CheckpointError(f"{what}: refused: {_said(error)}. {CREDENTIALS}", code=DENIED) from None
        except (BaseError, NotImplementedError) as error:
            text = str(error)
            if "NoSuchBucket" in text or "ContainerNotFound" in text:
                raise CheckpointError(f"{what}: there is no such bucket: {_said(error)}", code=DENIED) from None
            raise CheckpointError(f"{what}: {_said(error)}", code=REMOTE) from None
        except BaseException as error:
            if type(error).__module__ != _PANICS:
                raise
            text = f"{what}: the client gave up: {_said(error)}: look at the endpoint (AWS_ENDPOINT_URL)"
            raise CheckpointError(text, code=REMOTE) from None


CREDENTIALS: Final = (
    "Credentials are taken from the environment of the process that asks: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the machine's own role"
)


def open_store(
    uri: str, below: str = "", patience: Patience = Patience(), environ: Mapping[str, str] | None = None
) -> ObjectStore:
    """The store of a ``checkpoint.uri``, or a prefix ``below`` it. Nothing is asked yet. Raises ``CheckpointError``
    (``checkpoint-no-client``, ``checkpoint-remote-denied``); ``ValueError`` for a uri that no spec may have."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ValueError(f"{uri!r} is not of {', '.join(SCHEMES)}")
    bucket, _, prefix = rest.partition("/")
    where = "/".join(part for part in (f"{scheme}://{bucket}", prefix, below) if part)
    try:
        make = _makers()[scheme]
    except ImportError as error:
        text = f"{where} needs the package obstore ({error}): pip install 'ratchet-train[s3]'"
        raise CheckpointError(text, code=NO_CLIENT) from None
    environ = os.environ if environ is None else environ
    client = {**patience.client, **_plain_http(scheme, environ)}
    options: dict[str, Any] = {"client_options": client, "retry_config": patience.retries}
    inner = "/".join(part for part in (prefix, below) if part)
    if inner:
        options["prefix"] = inner
    if scheme == "s3" and "AWS_CHECKSUM_ALGORITHM" not in environ:
        options["checksum_algorithm"] = "SHA256"
    try:
        return ObjectStore(make(bucket, **options), where)
    except Exception as error:  # of a builder that misses its settings
        raise CheckpointError(f"{where}: {_said(error)}. {CREDENTIALS}", code=DENIED) from None


def _makers() -> dict[str, Callable[..., Any]]:
    from obstore.store import AzureStore, GCSStore, S3Store

    return {"s3": S3Store, "gs": GCSStore, "az": AzureStore}


def _plain_http(scheme: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """An endpoint that is given without TLS is meant: somebody has written it out."""
    names = {"s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"), "az": ("AZURE_STORAGE_ENDPOINT",)}
    given = [environ.get(name, "") for name in names.get(scheme, ())]
    return {"allow_http": True} if any(url.startswith("http://") for url in given) else {}


def _delete_one(raw: Any, name: str) -> None:
    import obstore

    try:
        obstore.delete(raw, name)
    except FileNotFoundError:
        return


def _said(error: BaseException) -> str:
    """What obstore says, without its inner structure, on one line, and without any credential."""
    text = " ".join(str(error).partition("\n\nDebug source:")[0].split())
    for name, value in os.environ.items():
        if name.startswith(_PROVIDERS) and _SECRET.search(name) and len(value) >= 4:
            text = text.replace(value, "***")
    return _USER.sub("//***@", text)[:_LONGEST]
