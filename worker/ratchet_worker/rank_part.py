"""One rank's part of a save, once its tensors are to be copied: its file, what it sees of the other replicas, what it tells.

The heavy work (memory copies, XXH3, write, fsync) runs without the GIL, so that a process of its own would gain nothing; beside
a training it runs in threads that leave most of the processor to those that train. While the loop waits for the save they do
not: it is then the saving thread's own work, or it takes part in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from ratchet_contract.manifest import HOOK_SUMMARY, RANK_PREFIX, SHARED_PREFIX
from ratchet_contract.paths import JobPaths
from ratchet_hooks.summary import HookSummary
from ratchet_store.blockwise import Range
from ratchet_store.rankfile import RankWriter, Written
from ratchet_store.slices import Slice
from ratchet_worker import fingerprint
from ratchet_worker.aside import Aside, Call
from ratchet_worker.content import Content
from ratchet_worker.disk import Disk
from ratchet_worker.live_memory import SafeReader
from ratchet_worker.reporter import Reporter
from ratchet_worker.save import Save
from ratchet_worker.staging import Staged, Staging

_LET_GO: Final = 0.001
"""Seconds in which a loop that was let go takes Python's lock, before two threads of a save want it: behind them it would wait
for a switch interval, which is five times as long (``sys.getswitchinterval``)."""
_PATIENCE: Final = 1.0
"""Seconds beside a training until a file that is still being written is not left to the quiet threads any more: on a machine
whose processors are all busy they might never come to an end."""


class _Looked(NamedTuple):
    """``seen``: digests of others' parts."""

    seen: dict[int, list[str]]
    summary: HookSummary


class _Own(NamedTuple):
    """The parts that this rank writes, and where their slices lie in what it writes; both follow from ``form`` and ``plan``."""

    form: object
    plan: object
    parts: Sequence[Sequence[Slice]]
    ranges: list[Range]

    def by_part(self, digests: Sequence[str]) -> list[list[str]]:
        left = iter(digests)
        return [[*islice(left, len(slices))] for slices in self.parts]


class RankPart:
    """Of one rank, for one save after the other."""

    def __init__(self, job: JobPaths, epoch: int, rank: int, world_size: int, staging: Staging) -> None:
        self._job, self._epoch, self._rank, self._world_size = job, epoch, rank, world_size
        self._staging, self._cuts = staging, fingerprint.Cuts()
        self._writer, self._reader = RankWriter(rank, world_size), SafeReader()
        self._disk = Disk(job.checkpoints)
        self._prompt = Aside("ratchet-writer")
        self._quiet = Aside("ratchet-quiet-writer", quiet=True), Aside("ratchet-quiet-digests", quiet=True)
        self._own: _Own | None = None

    def directory(self, save: Save) -> Path:
        return self._job.checkpoint(save.order.step, self._epoch)

    def made(self, save: Save, reporter: Reporter) -> tuple[dict[str, Any], str]:
        """Copy, compare, write: what this rank tells of its part, and its list of tensors as JSON. Raises what fails only this
        save."""
        content, staged = save.content, save.staged
        if content is None or staged is None:
            return {"error": save.error}, ""
        staged.finish()
        self._disk.insist()
        seen = None
        if save.is_hurried:  # it is let go first: it would wait for what the others do in Python, too
            seen = self._compared(save, content)
            save.released.set()
            time.sleep(_LET_GO)
        own = self._own_parts(content, staged)
        writing = self._writing(save, staged, content, own)
        try:
            if save.thorough:
                looked = self._looked(save, content, staged, seen)
            else:
                call = self._quiet[1].begin(lambda: self._looked(save, content, staged, seen))
                save.wait_its_turn()
                save.attention.wait(_PATIENCE)
                self._writer.help()
                looked = call.result()
            self._writer.help()
        finally:
            save.release()  # before all: the disk may hang
            written = writing.result()
        save.require_intact()
        reporter.saved_hook(looked.summary)
        report = {
            "error": None,
            "step": save.order.step,
            "finished": save.order.finished,
            "file": written.file.model_dump(),
            "parts": own.by_part(written.digests),
            "seen": looked.seen,
            "summary": HOOK_SUMMARY.dump_json(looked.summary).decode(),
        }
        return report, written.listing

    def _writing(self, save: Save, staged: Staged, content: Content, own: _Own) -> Call[Written]:
        pieces, data = staged.written()

        def write() -> Written:
            try:
                save.wait_its_turn()
                state = content.snapshot.state
                written = self._writer.write(self.directory(save), pieces, data, state, own.ranges)
                self._disk.insist()
                return written
            finally:
                save.attention.set()

        return (self._prompt if save.thorough else self._quiet[0]).begin(write)

    def _looked(self, save: Save, content: Content, staged: Staged, seen: dict[int, list[str]] | None) -> _Looked:
        try:
            seen = self._compared(save, content) if seen is None else seen
        finally:
            save.released.set()
        return _Looked(seen, self._summary(content, staged))

    def _compared(self, save: Save, content: Content) -> dict[int, list[str]]:
        """Digests of what others write, of the live tensors, for as long as these stay as they are."""
        if not content.parts:
            return {}
        sizes = content.snapshot.sizes()
        with self._staging.beside():
            return fingerprint.compared(
                self._plan(content), content.snapshot.shared, self._rank, self._world_size, save.order.number,
                fingerprint.nbytes_of(sizes), lambda: save.is_hurried, self._reader,
            )  # fmt: skip

    def _own_parts(self, content: Content, staged: Staged) -> _Own:
        rank, world, parts, plan = self._rank, self._world_size, content.parts, self._plan(content)
        if self._own is None or self._own.form is not staged.form or self._own.plan is not plan:
            own = plan[rank * parts // world : (rank + 1) * parts // world]
            ranges = staged.ranges(SHARED_PREFIX, chain.from_iterable(own))
            self._own = _Own(staged.form, plan, own, ranges)
        return self._own

    def _plan(self, content: Content) -> Sequence[Sequence[Slice]]:
        return self._cuts.of(content.snapshot.sizes(), content.parts or 1)

    def _summary(self, content: Content, staged: Staged) -> HookSummary:
        copies = staged.tensors(f"{RANK_PREFIX}{self._rank}/hook/")
        return replace(content.summary, residual_norm=content.norm_of(copies))
