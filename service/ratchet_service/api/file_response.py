"""Responses that hold resources (an open file, a concurrency slot) only while their client reads them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import BinaryIO, Final

from fastapi.responses import StreamingResponse
from starlette.types import Message, Send

log = logging.getLogger("ratchet.service")
_CHUNK: Final = 1 << 20


class Sending(StreamingResponse):
    """A response that streams ``parts`` and then closes ``resources``. It is cut off if sending one part takes longer than
    ``part_seconds``."""

    def __init__(
        self,
        parts: Iterator[bytes],
        resources: ExitStack,
        part_seconds: float,
        *,
        headers: Mapping[str, str],
        media_type: str,
        status_code: int = 200,
    ) -> None:
        super().__init__(parts, status_code, headers=headers, media_type=media_type)
        self._resources, self._part_seconds = resources, part_seconds

    async def stream_response(self, send: Send) -> None:
        """Send the response, each part within the time limit, and close the resources at the end."""

        async def send_within_limit(message: Message) -> None:
            async with asyncio.timeout(self._part_seconds):
                await send(message)

        try:
            await super().stream_response(send_within_limit)
        except TimeoutError:  # the server closes the connection of an incomplete response
            log.warning("a response was aborted: its client read less than 1 MiB within %g s", self._part_seconds)
        finally:
            self._resources.close()


def read_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the file's bytes from its current position to its end, in chunks of at most 1 MiB."""
    while chunk := file.read(_CHUNK):
        yield chunk
