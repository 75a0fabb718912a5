"""Uploads of code, for a service that cannot see the client's directories."""

from __future__ import annotations

import asyncio
import tempfile
from typing import IO, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from ratchet_contract.code.archive import MEDIA_TYPE, BadArchive, largest_archive
from ratchet_contract.code.tree import Limits
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import HomePaths
from ratchet_service.api.request_body import content_length, iter_body, media_type_of
from ratchet_service.observability import disk_space
from ratchet_service.user_code import snapshot

_BLOCK: Final = 1 << 20


class Uploads:
    """Receives archives of code from clients: many bodies concurrently, while the archives are unpacked one at a time."""

    def __init__(self, homes: HomePaths, limits: Limits | None = None) -> None:
        self._root = homes.code
        self._limits = limits or Limits()
        self._lock = asyncio.Lock()

    def renew(self, digest: str) -> None:
        """Keep existing code for another ten minutes, even if no job names it. Raises ``NotFound`` (``code-not-found``)."""
        if not snapshot.keep_alive(digest, self._root):
            raise NotFound(f"there is no code with the digest {digest}", code="code-not-found")

    async def receive(self, request: Request, digest: str) -> bool:
        """Store the request's body, an archive, as the tree of code with ``digest``. Return False if the tree existed already.
        Raises ``Refused`` for a rejected upload."""
        if media_type_of(request) != MEDIA_TYPE:
            text = f"content type {media_type_of(request) or 'missing'!r} is not supported here: send {MEDIA_TYPE}"
            raise Refused(text, code="unsupported-media-type")
        try:
            with await run_in_threadpool(self._open_temporary) as file:
                await self._write_body(file, request)
                async with self._lock:
                    return await run_in_threadpool(snapshot.store_upload, file, digest, self._root, self._limits)
        except ClientDisconnect:
            raise _invalid_archive("it is incomplete") from None
        except BadArchive as error:
            raise _invalid_archive(str(error)) from None
        except OSError as error:
            if not disk_space.is_disk_full_error(error, self._root):
                raise
            raise disk_space.disk_full_error(
                self._root, "the uploaded code is not stored", content_length(request)
            ) from error

    def _open_temporary(self) -> IO[bytes]:
        """Return a temporary file without a name on the disk of the code, so that no crash leaves it behind."""
        self._root.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self._root)

    async def _write_body(self, file: IO[bytes], request: Request) -> None:
        """Write the request's body to ``file``, and position the file at its start. Raises as ``iter_body`` does."""
        block = bytearray()
        async for part in iter_body(request, largest_archive(self._limits)):
            block += part
            if len(block) >= _BLOCK:
                await run_in_threadpool(file.write, bytes(block))
                block.clear()
        await run_in_threadpool(file.write, bytes(block))
        await run_in_threadpool(file.seek, 0)


def _invalid_archive(why: str) -> Refused:
    """Return the error (``code-archive-invalid``) for an archive that is rejected. ``why``: the reason, for the message."""
    return Refused(f"the archive was rejected: {why}", code="code-archive-invalid")
