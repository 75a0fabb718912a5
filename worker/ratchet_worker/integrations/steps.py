"""The steps of a Session where the loop is another package's: it tells when a step begins, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ratchet_contract.errors import UserError
from ratchet_worker import rng
from ratchet_worker.session import Session


def goes_on(session: Session) -> bool:
    """Does this attempt begin with a checkpoint of its own job? A fork begins with another's, and may train longer than that."""
    runtime = session._runtime
    manifest = runtime.chosen.manifest
    return manifest is not None and manifest.job_id == runtime.launch.job_id


def refuse_other_epochs(
    recorded: Mapping[str, Any],
    now: Mapping[str, int],
    data: str = "data of a fixed global batch: session.register(data=TrainLoader(..., batch_is='global'))",
) -> None:
    """Raises ``ValueError`` where an epoch of now has other steps than the ``recorded`` one: the package counts in them, and what
    it does at an epoch's end would come at another place or not at all. ``data``: which do not, in words."""
    for name, value in now.items():
        if recorded[name] != value:
            raise ValueError(
                f"{name} was {recorded[name]}, now it is {value}; on another number of ranks the same steps come from {data}"
            )


class Steps:
    """``settle`` puts back what the package itself changed between ``restore`` and its first step."""

    def __init__(self, session: Session, package: str, settle: Callable[[], None]) -> None:
        self._session, self._package, self._settle = session, package, settle
        self._steps: Iterator[int] | None = None
        self._generators: dict[str, Any] | None = None

    def restore(self, total: int | None) -> None:
        """Everything is registered. ``total``: steps of the whole job, None where the package cannot tell."""
        self._session.restore(total)
        if self._session._runtime.done:
            self._session._runtime.nothing_left()
        if self._session.resumed:
            self._generators = rng.capture(self._session.device)

    def next(self) -> None:
        """End the step that is open, if there is one, and begin another. Raises ``Stopped``, and ``UserError`` after the last."""
        if self._steps is None:
            self._steps = self._session.steps(self._session._runtime.total)
            self._settle()
            if self._generators is not None:
                rng.restore(self._generators, self._session.device)
        if next(self._steps, None) is None:
            raise UserError(
                f"{self._package} asks for a batch after step {self._session.step}, the last one by its own limits"
            )
