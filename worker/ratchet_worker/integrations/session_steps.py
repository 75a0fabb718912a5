"""The steps of a Session whose loop is another package's: the package only reports when a step begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ratchet_contract.errors import UserError
from ratchet_worker.session.session import Session
from ratchet_worker.state import rng


def continues_own_job(session: Session) -> bool:
    """True if this attempt starts from a checkpoint of its own job; False also at a fork's start."""
    runtime = session._runtime
    manifest = runtime.chosen.manifest
    return manifest is not None and manifest.job_id == runtime.launch.job_id


def check_same_epochs(
    recorded: Mapping[str, Any],
    now: Mapping[str, int],
    data: str = "data of a fixed global batch: session.register(data=TrainLoader(..., batch_is='global'))",
) -> None:
    """Raise ``ValueError`` if a number in ``now`` differs from the ``recorded`` one. ``data``: what to use, for the message."""
    for name, value in now.items():
        # The package counts in epochs: what it does at an epoch's end would happen at another step or not at all.
        if recorded[name] != value:
            raise ValueError(
                f"{name} was {recorded[name]}, now it is {value}; to do the same steps on another number of ranks use {data}"
            )


class Steps:
    """The steps of ``session`` for a package that has its own loop. ``package``: its name, for messages.
    ``undo_package_changes``: called once, before the attempt's first step."""

    def __init__(self, session: Session, package: str, undo_package_changes: Callable[[], None]) -> None:
        self._session, self._package, self._undo_package_changes = session, package, undo_package_changes
        self._steps: Iterator[int] | None = None
        self._generators: dict[str, Any] | None = None

    def restore(self, total: int | None) -> None:
        """Restore the state, once, after everything is registered. ``total``: steps of the whole job, if known. Raises as
        ``Session.restore`` does."""
        self._session.restore(total)
        if self._session._runtime.done:
            self._session._runtime.mark_nothing_left()
        if self._session.resumed:
            self._generators = rng.capture(self._session.device)

    def next_step(self) -> None:
        """End the open step, if there is one, and begin another. Raises ``Stopped``, and ``UserError`` after the last step."""
        if self._steps is None:
            self._steps = self._session.steps(self._session._runtime.total)
            self._undo_package_changes()
            if self._generators is not None:
                # The package may have drawn from them since the restore.
                rng.restore(self._generators, self._session.device)
        if next(self._steps, None) is None:
            raise UserError(
                f"{self._package} requests a batch after step {self._session.step}, the last one by its own limits"
            )
