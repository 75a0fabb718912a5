"""Faults planted in the product: a run that finds none of them would prove nothing. ``--planted NAME`` puts one into every
process of the control plane and every stand-in rank."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from ratchet_contract.paths import checkpoint_dir_name
from ratchet_service.db import leases
from ratchet_service.launchers.base import AttemptState
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.launchers.local.standby import Standby
from ratchet_service.reconciler import supervise
from ratchet_store.retention.attempt_retention import Keeper
from tests.support.sim import mutants

_KEPT: Final = ExitStack()
"""As long as the process."""


def no_proof() -> None:
    """An agent that does not stir is taken for dead, and whoever of its attempt is alive is left alone."""
    original = LocalLauncher.poll

    def poll(self: Any, ref: Any) -> AttemptState:
        state = original(self, ref)
        still = any(node.agent is not None and _stopped(node.agent.pid) for node in state.nodes)
        return AttemptState(False, state.nodes) if still else state

    LocalLauncher.poll = poll  # type: ignore[method-assign]
    LocalLauncher.kill = lambda self, ref: []  # type: ignore[method-assign]
    LocalLauncher.sweep = lambda self, known: []  # type: ignore[method-assign]


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def no_fence() -> None:
    """What an agent has left on the disk is not read at its attempt's end, and its reports are stored whenever they come."""
    _KEPT.enter_context(mutants.no_fence())
    _KEPT.enter_context(patch.object(supervise, "ingest_leftover", lambda *_: None))


def newest_deleted() -> None:
    """Retention deletes the newest checkpoint and keeps the one before it."""
    original = Keeper.on_committed

    def committed(self: Any, manifest: Any) -> Any:
        found = original(self, manifest)
        if not manifest.finished:
            shutil.rmtree(Path(self._checkpoints) / checkpoint_dir_name(manifest.step, manifest.attempt))
        return found

    Keeper.on_committed = committed  # type: ignore[method-assign]


def nothing_adopted() -> None:
    """Checkpoints whose report was lost are not taken in."""
    _KEPT.enter_context(mutants.nothing_adopted())


def counted_twice() -> None:
    """A preemption counts as two."""
    _KEPT.enter_context(mutants.counted_twice())


def any_lease() -> None:
    """Every lease is free to be taken at any time, and whoever has lost one goes on."""
    leases.owner_is_dead = lambda _: True  # type: ignore[assignment]
    _KEPT.enter_context(mutants.no_token())


def descriptor_kept() -> None:
    """A descriptor stays open after each tenth poll of an attempt."""
    original, polls = LocalLauncher.poll, itertools.count(1)

    def poll(self: Any, ref: Any) -> AttemptState:
        if next(polls) % 10 == 0:
            os.open(os.devnull, os.O_RDONLY)
        return original(self, ref)

    LocalLauncher.poll = poll  # type: ignore[method-assign]


def parked_kept() -> None:
    """A parked agent is forgotten instead of ended."""

    def end(self: Any, parked: Any) -> None:
        self._parked.remove(parked)

    Standby._end = end  # type: ignore[method-assign]


PLANTED: dict[str, Callable[[], None]] = {
    made.__name__: made
    for made in (
        no_proof, no_fence, newest_deleted, nothing_adopted, counted_twice, any_lease, descriptor_kept, parked_kept
    )
}  # fmt: skip


def plant(name: str) -> None:
    """In this process. Raises ``KeyError``."""
    PLANTED[name]()
