"""One save on one rank, which the loop hands over to the saving thread.

Its stages, each with the module that does it, are: capture (``rank_state``: state -> snapshot), copy (``host_copy``: live tensors
-> one buffer), write (``rank_file``, and ``write`` of ``ratchet_store``: buffer and list of pieces -> file), commit
(``manifest_commit``: all ranks' reports -> manifest) and retain (delete older checkpoints). The loop captures, then the save goes
through these states, one after the other (``SaveState``); a failure only makes it skip work::

    COPYING     copy: tensors are copied, and compared with other ranks', while training continues
       |        from here on the live tensors may change: a loop that waits for them continues
    WRITING     write, commit: the file is written (that mostly began during COPYING), synced and reported to rank 0
       |        the verdict is there: the manifest is committed, or the save has failed
    RETAINING   retain: rank 0 deletes older checkpoints (for a ``thorough`` save, it has deleted them during WRITING)
       |        the next save may write
    ENDED
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import IntEnum

from ratchet_contract.errors import StateError
from ratchet_worker.checkpoint.checkpoint_content import Content
from ratchet_worker.checkpoint.host_copy import Staged
from ratchet_worker.checkpoint.manifest_commit import Order, Verdict
from ratchet_worker.checkpoint.threads import Signal
from ratchet_worker.state.live_memory import LiveTensors
from ratchet_worker.state.snapshot import Until


class SaveState(IntEnum):
    """What a save is doing; see above. It never goes back to an earlier state."""

    COPYING = 0
    WRITING = 1
    RETAINING = 2
    ENDED = 3


class Progress:
    """The state of one save. Threads can wait for it, and for other changes by ``signal``."""

    def __init__(self) -> None:
        self.state = SaveState.COPYING
        self.signal = Signal()
        self._lock = threading.Lock()  # not taken by the loop's thread, which a signal handler may interrupt

    def advance(self, state: SaveState) -> None:
        """Go on to ``state``, unless the save is as far already. The loop's thread must not call it."""
        with self._lock:
            self.state = max(self.state, state)
        self.signal.notify()

    def wait_for(self, state: SaveState, timeout: float | None = None) -> bool:
        """Wait until the save has come to ``state`` or a later one, for at most ``timeout`` seconds. Return True if it has."""
        return self.signal.wait_for(lambda: self.state >= state, timeout)


@dataclass
class Save:
    """One save on one rank; the saving thread fills in the result. ``error``: why there is nothing to write, else None.
    ``content``, ``staged``: what to write, and its copies; None after an ``error``. ``thorough``: training waits for the save.
    ``verdict``: the result, valid once ``is_done``, if ``failure`` is None."""

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
    previous: Progress | None = None
    """The progress of the previous save: nothing is written before it has ``ENDED``."""
    progress: Progress = field(default_factory=Progress)
    loop_waits: bool = False
    """The loop has begun to wait for the tensors."""
    is_awaited: bool = False
    """The loop has begun to wait for the end of the save."""
    is_file_written: bool = False
    """This rank's file has been written, or could not be."""
    verdict: Verdict = field(default_factory=dict)
    failure: BaseException | None = None  # an error of the exchange: there is no verdict
    seconds: float = 0.0
    _check_lock: threading.Lock = field(default_factory=threading.Lock)
    _checked: set[Until] = field(default_factory=set)
    """The kinds of tensors that were checked, and may have changed since."""
    _change_error: StateError | None = None

    @property
    def is_done(self) -> bool:
        """True if the save has ended, but perhaps for the deletion of older checkpoints."""
        return self.progress.state >= SaveState.RETAINING

    @property
    def is_hurried(self) -> bool:
        """True once the loop has begun to wait for tensors of the kind ``Until.STEP``, unless the save is ``thorough``."""
        return self.loop_waits and not self.thorough

    @property
    def stall(self) -> float:
        """Seconds for which this save has held up the loop until now, by capturing state and by waits for copies. A wait that is
        in progress counts, also one for the end of the save."""
        seconds, since = self.stall_state
        return seconds + sum(time.perf_counter() - begun for begun in (since, self.drained_since) if begun is not None)

    def wait_until_copied(self, until: Until) -> float:
        """Wait until tensors of the kind ``until`` are copied and may change, or until the save has given up. Returns how many
        seconds this took. ``Until.STEP`` includes ``Until.BACKWARD``."""
        staged = self.staged
        if staged is None or self.is_done:
            return 0.0
        before, begun = self.stall_state[0], time.perf_counter()
        self.stall_state = before, begun
        try:
            if until is Until.STEP:
                self.loop_waits = True
            staged.wait(until)
            self._check(until)
            if until is Until.STEP:
                staged.wait(Until.BACKWARD)
                self._check(Until.BACKWARD)
                self.progress.wait_for(SaveState.WRITING)
        finally:
            seconds = time.perf_counter() - begun
            self.stall_state = before + seconds, None
        return seconds

    def _check(self, until: Until) -> None:
        """Check, once per kind, that tensors of the kind ``until`` have not changed. An error is kept for ``require_intact``."""
        with self._check_lock:
            staged, content = self.staged, self.content
            if until in self._checked or until is Until.BOUNDARY or staged is None or content is None:
                return
            try:
                # the check at each copy misses a storage that was freed and allocated again at the same address
                staged.require_intact(until)
                shared = content.snapshot.shared
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
        if self.previous is not None:
            self.previous.wait_for(SaveState.ENDED)

    def wait_until_awaited_or_written(self, timeout: float) -> None:
        """Wait until the loop waits for the end of the save, or this rank's file is written, for at most ``timeout`` seconds."""
        self.progress.signal.wait_for(lambda: self.is_file_written or self.is_awaited, timeout)

    def set_file_written(self) -> None:
        """Record that this rank's file has been written, or could not be."""
        self.is_file_written = True
        self.progress.signal.notify()

    def drain(self, timeout: float) -> bool:
        """Wait for the end of the save, for at most ``timeout`` seconds, which count as a stall. Return True if it has ended.
        From now on its file is also written by threads that do not give way to the training."""
        self.drained_since = self.drained_since or time.perf_counter()
        if not self.is_awaited:
            self.is_awaited = True
            self.progress.signal.notify()
        return self.progress.wait_for(SaveState.RETAINING, timeout)

    def drop_state(self) -> None:
        """Drop the state once the save has ended: else the loop would, which takes it a tenth of a millisecond."""
        self.content = self.staged = None

    def release(self) -> None:
        """Drop the copies that no thread has taken, and release a loop that waits for the live tensors."""
        if self.staged is not None:
            self.staged.abandon()
        self.progress.advance(SaveState.WRITING)
