"""A limit on concurrent operations; a caller that gets no slot is refused at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ratchet_contract.errors import Refused


class ConcurrencyLimit:
    """A limit of ``number`` concurrent operations. ``activity``: what the service is doing while all slots are taken, such as
    "making other exports", for the error message. Thread-safe."""

    def __init__(self, number: int, activity: str) -> None:
        self._slots = threading.BoundedSemaphore(number)
        self._activity = activity

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Hold one slot during the block. Raises ``Refused`` (``busy``) at once if no slot is free."""
        if not self._slots.acquire(blocking=False):
            raise Refused(f"the service is {self._activity}: try again in a moment", code="busy")
        try:
            yield
        finally:
            self._slots.release()
