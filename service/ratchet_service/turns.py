"""So many at one time of what holds a thread and a process; whoever comes when no turn is left is refused at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ratchet_contract.errors import Refused


class Turns:
    """``number`` turns; ``what`` the service is doing while all are taken. Thread-safe."""

    def __init__(self, number: int, what: str) -> None:
        self._left = threading.BoundedSemaphore(number)
        self._what = what

    @contextmanager
    def taken(self) -> Iterator[None]:
        """One turn. Raises ``Refused`` (``busy``) where none is left: to wait for one would hold a thread, too."""
        if not self._left.acquire(blocking=False):
            raise Refused(f"the service is {self._what}: try again in a moment", code="busy")
        try:
            yield
        finally:
            self._left.release()
