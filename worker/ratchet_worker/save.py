"""One save on one rank, as the loop, which hands it over and may have to wait, and the saving thread both know it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from ratchet_contract.errors import StateError
from ratchet_worker.commitment import Order, Verdict
from ratchet_worker.content import Content
from ratchet_worker.latch import Latch
from ratchet_worker.live_memory import LiveTensors
from ratchet_worker.snapshot import Until
from ratchet_worker.staging import Staged


@dataclass
class Save:
    """One save on one rank. ``content`` and ``staged`` None: ``error`` says why there is nothing to write. ``thorough``: the
    replicas are compared wholly, since nothing is trained meanwhile."""

    order: Order
    content: Content | None
    staged: Staged | None
    error: str | None
    thorough: bool
    stood: tuple[float, float | None] = (0.0, None)
    """Seconds that the loop has stood still for it; and since when it does so again (``time.perf_counter``). In one piece, since
    the saving thread reads both while the loop, which alone writes it, waits."""
    behind: Latch | None = None
    """``settled`` of the save before: until then nothing is written."""
    hurry: Latch = field(default_factory=Latch)
    """Set: the loop waits for the tensors."""
    released: Latch = field(default_factory=Latch)
    """Set: the live tensors are not looked at any more."""
    attention: Latch = field(default_factory=Latch)
    """Set: somebody waits for the save, or its file has been written."""
    done: Latch = field(default_factory=Latch)
    settled: Latch = field(default_factory=Latch)
    """Set: older checkpoints are deleted, too, for which a training does not wait."""
    verdict: Verdict = field(default_factory=dict)
    failure: BaseException | None = None  # of the exchange: there is no verdict
    seconds: float = 0.0
    _gate: threading.Lock = field(default_factory=threading.Lock)
    _checked: set[Until] = field(default_factory=set)
    """The kinds of tensors that may have changed: the loop has checked them before."""
    _unlike: StateError | None = None

    @property
    def is_hurried(self) -> bool:
        """Does the loop wait for the live tensors?"""
        return self.hurry.is_set() and not self.thorough

    @property
    def stall(self) -> float:
        """Seconds that the loop stood still for it, until now: whoever tells it may be ahead of a loop that was just let go."""
        seconds, since = self.stood
        return seconds if since is None else seconds + time.perf_counter() - since

    def hold(self, until: Until) -> float:
        """Before this kind of tensor changes: wait until it is copied, and nobody reads it. Seconds. On CUDA a save that is
        released is copied by the host's account only: until it is done the present stream waits, too."""
        if self.staged is None or self.done.is_set():
            return 0.0
        before, begun = self.stood[0], time.perf_counter()
        self.stood = before, begun
        try:
            if until is Until.STEP:
                self.hurry.set()
            self.staged.wait(until)
            self._check(until)
            if until is Until.STEP:
                self.staged.wait(Until.BACKWARD)
                self._check(Until.BACKWARD)
                self.released.wait()
        finally:
            seconds = time.perf_counter() - begun
            self.stood = before + seconds, None
        return seconds

    def _check(self, until: Until) -> None:
        """Compare the tensors of this kind with what they were at the boundary, once, before they may change.

        A copy is compared as soon as it is made, but a storage that was freed and allocated again at the same address has other
        elements until user code fills it: torch counts that change after the copy."""
        with self._gate:
            if until in self._checked or until is Until.BOUNDARY or self.staged is None or self.content is None:
                return
            try:
                self.staged.require_intact(until)
                shared = self.content.snapshot.shared
                if until is Until.STEP and isinstance(shared, LiveTensors):
                    shared.require_all_intact()
            except StateError as error:
                self._unlike = self._unlike or error
            self._checked.add(until)

    def require_intact(self) -> None:
        """In the saving thread, when all is written. Raises ``StateError`` where what was copied and compared is not what the
        boundary had."""
        for until in (Until.BACKWARD, Until.STEP):
            self._check(until)
        if self._unlike is not None:
            raise self._unlike

    def wait_its_turn(self) -> None:
        """Until the save before has left the disk, so that it need hold no more."""
        if self.behind is not None:
            self.behind.wait()

    def release(self) -> None:
        """The live tensors are not looked at any more, be they copied or not."""
        if self.staged is not None:
            self.staged.abandon()
        self.released.set()
