"""One save on one rank, which the loop hands over to the saving thread."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from ratchet_contract.errors import StateError
from ratchet_worker.checkpoint.checkpoint_content import Content
from ratchet_worker.checkpoint.host_copy import Staged
from ratchet_worker.checkpoint.manifest_commit import Order, Verdict
from ratchet_worker.checkpoint.threads import Latch
from ratchet_worker.state.live_memory import LiveTensors
from ratchet_worker.state.snapshot import Until


@dataclass
class Save:
    """One save on one rank; the saving thread fills in the result. ``error``: why there is nothing to write, else None.
    ``content``, ``staged``: what to write, and its copies; None after an ``error``. ``thorough``: training waits for the save.
    ``verdict``: the result, valid once ``done`` is set, if ``failure`` is None."""

    order: Order
    content: Content | None
    staged: Staged | None
    error: str | None
    thorough: bool
    stall_state: tuple[float, float | None] = (0.0, None)
    """Seconds that the loop has spent on capturing and has waited for copies, and since when it is waiting again
    (``time.perf_counter``), else None. One tuple, since the saving thread reads both while the loop, the only writer, waits."""
    drained_since: float | None = None
    """Since when the loop is waiting for the save to end (``time.perf_counter``); None: it is not."""
    previous_retention_done: Latch | None = None
    """``retention_done`` of the previous save: nothing is written before it is set."""
    loop_waits: Latch = field(default_factory=Latch)
    """Set: the loop has begun to wait for the tensors."""
    released: Latch = field(default_factory=Latch)
    """Set: the live tensors are not read any more."""
    awaited: Latch = field(default_factory=Latch)
    """Set: a thread waits for the save, or its file has been written."""
    done: Latch = field(default_factory=Latch)
    retention_done: Latch = field(default_factory=Latch)
    """Set: this rank deletes no older checkpoints after this save any more."""
    verdict: Verdict = field(default_factory=dict)
    failure: BaseException | None = None  # an error of the exchange: there is no verdict
    seconds: float = 0.0
    _check_lock: threading.Lock = field(default_factory=threading.Lock)
    _checked: set[Until] = field(default_factory=set)
    """The kinds of tensors that were checked, and may have changed since."""
    _change_error: StateError | None = None

    @property
    def is_hurried(self) -> bool:
        """True once the loop has begun to wait for tensors of the kind ``Until.STEP``, unless the save is ``thorough``."""
        return self.loop_waits.is_set() and not self.thorough

    @property
    def stall(self) -> float:
        """Seconds for which this save has held up the loop until now, by capturing state and by waits for copies. A wait that is
        in progress counts, also one for the end of the save."""
        seconds, since = self.stall_state
        return seconds + sum(time.perf_counter() - begun for begun in (since, self.drained_since) if begun is not None)

    def wait_until_copied(self, until: Until) -> float:
        """Wait until tensors of the kind ``until`` are copied and may change, or until the save has given up. Returns how many
        seconds this took. ``Until.STEP`` includes ``Until.BACKWARD``."""
        if self.staged is None or self.done.is_set():
            return 0.0
        before, begun = self.stall_state[0], time.perf_counter()
        self.stall_state = before, begun
        try:
            if until is Until.STEP:
                self.loop_waits.set()
            self.staged.wait(until)
            self._check(until)
            if until is Until.STEP:
                self.staged.wait(Until.BACKWARD)
                self._check(Until.BACKWARD)
                self.released.wait()
        finally:
            seconds = time.perf_counter() - begun
            self.stall_state = before + seconds, None
        return seconds

    def _check(self, until: Until) -> None:
        """Check, once per kind, that tensors of the kind ``until`` have not changed. An error is kept for ``require_intact``."""
        with self._check_lock:
            if until in self._checked or until is Until.BOUNDARY or self.staged is None or self.content is None:
                return
            try:
                # the check at each copy misses a storage that was freed and allocated again at the same address
                self.staged.require_intact(until)
                shared = self.content.snapshot.shared
                if until is Until.STEP and isinstance(shared, LiveTensors):
                    shared.require_all_intact()
            except StateError as error:
                self._change_error = self._change_error or error
            self._checked.add(until)

    def require_intact(self) -> None:
        """Raise ``StateError`` if a tensor has changed too early. Called in the saving thread, when everything is written."""
        for until in (Until.BACKWARD, Until.STEP):
            self._check(until)
        if self._change_error is not None:
            raise self._change_error

    def wait_for_previous(self) -> None:
        """Wait, without a time limit, for the previous save's deletions, so that the disk need not hold one more checkpoint."""
        if self.previous_retention_done is not None:
            self.previous_retention_done.wait()

    def release(self) -> None:
        """Drop the copies that no thread has taken, and release a loop that waits for the live tensors."""
        if self.staged is not None:
            self.staged.abandon()
        self.released.set()
