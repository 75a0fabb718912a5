"""Sends bytes that hold something for as long as their client takes them, and no longer: a file, a turn."""

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
    """``held`` is given back with the answer. A client that does not take the next of ``parts`` (a MiB) within ``seconds`` is
    left with half of an answer."""

    def __init__(
        self,
        parts: Iterator[bytes],
        held: ExitStack,
        seconds: float,
        *,
        headers: Mapping[str, str],
        media_type: str,
        status_code: int = 200,
    ) -> None:
        super().__init__(parts, status_code, headers=headers, media_type=media_type)
        self._held, self._seconds = held, seconds

    async def stream_response(self, send: Send) -> None:
        async def in_time(message: Message) -> None:
            async with asyncio.timeout(self._seconds):
                await send(message)

        try:
            await super().stream_response(in_time)
        except TimeoutError:  # the server closes a connection whose answer is not complete
            log.warning("an answer was broken off: its client took no MiB of it within %g s", self._seconds)
        finally:
            self._held.close()


def chunks(file: BinaryIO) -> Iterator[bytes]:
    """From where the file stands to its end."""
    while chunk := file.read(_CHUNK):
        yield chunk
