"""Code that a client sends, for a service that does not see the client's directories."""

from __future__ import annotations

import asyncio
import tempfile
from typing import IO, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from ratchet_contract.code_archive import MEDIA_TYPE, BadArchive, largest_archive
from ratchet_contract.code_tree import Limits
from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import HomePaths
from ratchet_service import disk, snapshot
from ratchet_service.bodies import announced_by, media_type_of, parts_of

_BLOCK: Final = 1 << 20


class Uploads:
    """Takes archives, any number at a time; they are unpacked one after the other, as snapshots are taken."""

    def __init__(self, homes: HomePaths, limits: Limits | None = None) -> None:
        self._root = homes.code
        self._limits = limits or Limits()
        self._turn = asyncio.Lock()

    def look(self, digest: str) -> None:
        """Code that is there stays so for ten minutes. Raises ``NotFound`` (``code-not-found``)."""
        if not snapshot.keep(digest, self._root):
            raise NotFound(f"there is no code with the digest {digest}", code="code-not-found")

    async def take(self, request: Request, digest: str) -> bool:
        """The request's body as the tree with ``digest``; False where that was there already.

        Raises ``Refused`` (``unsupported-media-type``, ``body-too-large``, ``code-archive-invalid``, ``disk-full``).
        """
        if media_type_of(request) != MEDIA_TYPE:
            text = f"content type {media_type_of(request) or 'missing'!r} is not understood here: send {MEDIA_TYPE}"
            raise Refused(text, code="unsupported-media-type")
        try:
            with await run_in_threadpool(self._file) as file:
                await self._fill(file, request)
                async with self._turn:
                    return await run_in_threadpool(snapshot.receive, file, digest, self._root, self._limits)
        except ClientDisconnect:
            raise _invalid("it was cut short") from None
        except BadArchive as error:
            raise _invalid(str(error)) from None
        except OSError as error:
            if not disk.is_full(error, self._root):
                raise
            raise disk.full(self._root, "the code that was sent is not kept", announced_by(request)) from error

    def _file(self) -> IO[bytes]:
        """Without a name, so that no crash leaves it behind."""
        self._root.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self._root)

    async def _fill(self, file: IO[bytes], request: Request) -> None:
        block = bytearray()
        async for part in parts_of(request, largest_archive(self._limits)):
            block += part
            if len(block) >= _BLOCK:
                await run_in_threadpool(file.write, bytes(block))
                block.clear()
        await run_in_threadpool(file.write, bytes(block))
        await run_in_threadpool(file.seek, 0)


def _invalid(why: str) -> Refused:
    return Refused(f"the archive cannot be taken: {why}", code="code-archive-invalid")
