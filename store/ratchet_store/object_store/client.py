"""An object store (S3 and compatible stores, Google Cloud Storage, Azure) below one prefix, through obstore. obstore finds
the credentials itself, for example in the process's environment or by the machine's own role."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

from ratchet_contract.errors import CheckpointError
from ratchet_contract.spec.checkpoint import SCHEMES
from ratchet_store.filesystem.durable_io import MISSING

REMOTE: Final = "checkpoint-remote"  # the store does not respond, or fails: nothing is proved about its content
DENIED: Final = "checkpoint-remote-denied"  # the store refuses: no or wrong credentials, no such bucket, no permission
NO_CLIENT: Final = "checkpoint-no-client"  # the package obstore is not installed

PART: Final = 16 << 20
"""Bytes of one part of a multipart upload. S3 accepts 10,000 parts: 160 GB per rank file; larger files get larger parts."""
MAX_PARTS: Final = 9_000
CONCURRENCY: Final = 2
"""Concurrent requests of one upload: training has priority on the network."""
_DIGEST_ATTRIBUTE: Final = "ratchet-digest"
_SECRET: Final = re.compile(r"(KEY|SECRET|TOKEN|PASSWORD|SIGNATURE|CREDENTIAL|SAS)", re.ASCII)
_URL_CREDENTIALS: Final = re.compile(r"//[^/\s@]+@", re.ASCII)
"""User and password in an endpoint's URL."""
_PANICS: Final = "pyo3_runtime"
"""Module of the exception that the client raises when it panics, which is no ``Exception``."""
_PROVIDERS: Final = ("AWS_", "GOOGLE_", "AZURE_")
_MAX_ERROR_CHARS: Final = 600  # characters of a store's error message


@dataclass(frozen=True)
class Patience:
    """Time limits of requests, in seconds. ``connect``: for opening a connection. ``request``: for one try of a request.
    ``retry``: the time after which no further try begins."""

    connect: float = 5.0
    request: float = 120.0
    retry: float = 60.0

    @property
    def client_options(self) -> dict[str, Any]:
        """The limits of one try, as obstore's ``client_options``."""
        return {
            "connect_timeout": timedelta(seconds=self.connect),
            "timeout": timedelta(seconds=self.request),
        }

    @property
    def retry_config(self) -> dict[str, Any]:
        """The limits of all tries of a request, as obstore's ``retry_config``."""
        backoff = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2}
        return {"max_retries": 10, "retry_timeout": timedelta(seconds=self.retry), "backoff": backoff}


BRIEF: Final = Patience(2.0, 4.0, 3.0)
"""For a caller that waits for the response."""


class Found(NamedTuple):
    """An object in the store: its size in bytes, and the digest stored with it, if any."""

    size: int
    digest: str | None


class ObjectStore:
    """The objects below one prefix of a store; names are relative to it. Thread-safe; calls block and raise
    ``CheckpointError``."""

    def __init__(self, raw: Any, url: str, *, digests: bool = True) -> None:
        """``raw``: a store object of obstore; ``url``: its name in messages; ``digests``: the store keeps attributes of
        objects."""
        self._raw = raw
        self.url = url.rstrip("/")
        self._digests = digests

    def put(self, name: str, chunks: Iterable[bytes | memoryview], size: int, digest: str) -> None:
        """Create or replace one object made of ``chunks``, completely or not at all. ``size``: bytes of all chunks;
        ``digest``: stored with it where the store keeps attributes."""
        import obstore

        attributes = {_DIGEST_ATTRIBUTE: digest} if self._digests else None
        with self._translate_errors("put", name):
            if size <= PART:
                obstore.put(self._raw, name, b"".join(chunks), attributes=attributes, use_multipart=False)
            else:
                part = max(PART, -(-size // MAX_PARTS))
                obstore.put(
                    self._raw, name, iter(chunks), attributes=attributes, use_multipart=True, chunk_size=part,
                    max_concurrency=CONCURRENCY,
                )  # fmt: skip

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object and return True, or return False if it exists already. If a response was lost, the existing object
        may be the one that this call has created: compare the content."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._translate_errors("put", name):
            try:
                obstore.put(self._raw, name, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def get(self, name: str, limit: int) -> bytes:
        """Return the content of a small object. Raise ``checkpoint-missing``, or ``checkpoint-damaged`` for more than
        ``limit`` bytes."""
        found = self.head(name)
        if found.size > limit:
            raise CheckpointError(f"{self.url}/{name} has {found.size} bytes, more than the {limit} it may have")
        return bytes(self.get_range(name, 0, found.size)) if found.size else b""

    def get_range(self, name: str, begin: int, end: int) -> memoryview:
        """Return bytes ``begin <= i < end`` of an object; fewer if it ends in between."""
        import obstore

        with self._translate_errors("get", name):
            return memoryview(obstore.get_range(self._raw, name, start=begin, end=end))

    def head(self, name: str) -> Found:
        """Return size and digest of an object without its content. Raises ``checkpoint-missing``."""
        import obstore

        with self._translate_errors("head", name):
            result = obstore.get(self._raw, name, options={"head": True})
            return Found(int(result.meta["size"]), result.attributes.get(_DIGEST_ATTRIBUTE))

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return the sizes of all objects below ``prefix`` by name. ``prefix`` is empty (all objects) or ends with a ``/``."""
        import obstore

        with self._translate_errors("list", prefix):
            batches = obstore.list(self._raw, prefix=prefix or None)
            return {str(meta["path"]): int(meta["size"]) for batch in batches for meta in batch}

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, in no defined order, and return when all are gone; a missing one is not an error."""
        import obstore

        wanted = list(names)
        with self._translate_errors("delete", ", ".join(wanted[:3])):
            try:
                if wanted:
                    obstore.delete(self._raw, wanted)
            except FileNotFoundError:  # from a local directory, where the request stops at it
                for name in wanted:
                    _delete_one(self._raw, name)

    @contextmanager
    def _translate_errors(self, verb: str, name: str) -> Iterator[None]:
        """Context manager: convert errors of obstore in the block to ``CheckpointError``. ``verb`` and ``name``: for the
        message."""
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        what = f"{verb} {self.url}/{name}"
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise CheckpointError(f"{what}: there is no such bucket: {_error_text(error)}", code=DENIED) from None
            raise CheckpointError(f"{what}: there is no such object", code=MISSING) from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise CheckpointError(f"{what}: refused: {_error_text(error)}. {CREDENTIALS}", code=DENIED) from None
        except (BaseError, NotImplementedError) as error:
            text = str(error)
            if "NoSuchBucket" in text or "ContainerNotFound" in text:
                raise CheckpointError(f"{what}: there is no such bucket: {_error_text(error)}", code=DENIED) from None
            raise CheckpointError(f"{what}: {_error_text(error)}", code=REMOTE) from None
        except BaseException as error:
            if type(error).__module__ != _PANICS:
                raise
            text = f"{what}: the client gave up: {_error_text(error)}: check the endpoint (AWS_ENDPOINT_URL)"
            raise CheckpointError(text, code=REMOTE) from None


CREDENTIALS: Final = (
    "Credentials are read from the environment of the requesting process: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the machine's own role"
)


def open_store(
    uri: str, subprefix: str = "", patience: Patience = Patience(), environ: Mapping[str, str] | None = None
) -> ObjectStore:
    """Return access to the store that ``uri`` names, below ``subprefix``. No request is sent. ``uri``: a ``checkpoint.uri``.
    ``environ``: variables that control plain HTTP and checksums; None: those of this process. Raise ``CheckpointError`` for
    missing settings or packages, ``ValueError`` for an unknown scheme."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ValueError(f"{uri!r} must start with one of {', '.join(SCHEMES)}")
    bucket, _, prefix = rest.partition("/")
    where = "/".join(part for part in (f"{scheme}://{bucket}", prefix, subprefix) if part)
    try:
        make = _store_classes()[scheme]
    except ImportError as error:
        text = f"{where} needs the package obstore ({error}): pip install 'ratchet-train[s3]'"
        raise CheckpointError(text, code=NO_CLIENT) from None
    environ = os.environ if environ is None else environ
    client = {**patience.client_options, **_http_options(scheme, environ)}
    options: dict[str, Any] = {"client_options": client, "retry_config": patience.retry_config}
    inner = "/".join(part for part in (prefix, subprefix) if part)
    if inner:
        options["prefix"] = inner
    if scheme == "s3" and "AWS_CHECKSUM_ALGORITHM" not in environ:
        options["checksum_algorithm"] = "SHA256"
    try:
        return ObjectStore(make(bucket, **options), where)
    except Exception as error:  # of a builder with missing settings
        raise CheckpointError(f"{where}: {_error_text(error)}. {CREDENTIALS}", code=DENIED) from None


def _store_classes() -> dict[str, Callable[..., Any]]:
    """Return obstore's store classes by URI scheme. Raises ``ImportError`` if obstore is not installed."""
    from obstore.store import AzureStore, GCSStore, S3Store

    return {"s3": S3Store, "gs": GCSStore, "az": AzureStore}


def _http_options(scheme: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the client option that allows plain HTTP, if an endpoint in ``environ`` begins with ``http://``; else nothing."""
    names = {"s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"), "az": ("AZURE_STORAGE_ENDPOINT",)}
    given = [environ.get(name, "") for name in names.get(scheme, ())]
    return {"allow_http": True} if any(url.startswith("http://") for url in given) else {}


def _delete_one(raw: Any, name: str) -> None:
    """Delete one object; a missing one is not an error."""
    import obstore

    try:
        obstore.delete(raw, name)
    except FileNotFoundError:
        return


def _error_text(error: BaseException) -> str:
    """Return obstore's error message on one line, cut, with credentials from URLs and the environment replaced by ``***``."""
    text = " ".join(str(error).partition("\n\nDebug source:")[0].split())
    for name, value in os.environ.items():
        if name.startswith(_PROVIDERS) and _SECRET.search(name) and len(value) >= 4:
            text = text.replace(value, "***")
    return _URL_CREDENTIALS.sub("//***@", text)[:_MAX_ERROR_CHARS]
