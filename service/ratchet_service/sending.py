"""Sends a file that exists for its answer alone: while the client takes it, and no longer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from io import BufferedRandom
from typing import Final

from fastapi.responses import StreamingResponse
from starlette.types import Message, Send

log = logging.getLogger("ratchet.service")
_CHUNK: Final = 1 << 20


class Sending(StreamingResponse):
    """``file`` from where it stands; it is closed with the answer. A client that does not take the next MiB within ``seconds`` is
    left with half of an answer, since the file holds room on the disk of the checkpoints."""

    def __init__(self, file: BufferedRandom, seconds: float, *, headers: Mapping[str, str], media_type: str) -> None:
        super().__init__(_chunks(file), headers=headers, media_type=media_type)
        self._file, self._seconds = file, seconds

    async def stream_response(self, send: Send) -> None:
        async def in_time(message: Message) -> None:
            async with asyncio.timeout(self._seconds):
                await send(message)

        try:
            await super().stream_response(in_time)
        except TimeoutError:  # the server closes a connection whose answer is not complete
            log.warning("an export was broken off: its client took no MiB of it within %g s", self._seconds)
        finally:
            self._file.close()


def _chunks(file: BufferedRandom) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk
