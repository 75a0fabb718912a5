"""What several commands share: options, settings, the client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ratchet_client.client import RatchetClient
    from ratchet_contract.api import JobView

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print JSON: one document, or one object per line when following.")
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Job id.", show_default=False)]

_RETRY_FOR = 3.0
"""Seconds a command waits for a service that is just being restarted before it says that nothing answers."""


@dataclass(frozen=True)
class Settings:
    server: str | None
    home: Path | None


def settings(ctx: typer.Context) -> Settings:
    found = ctx.find_object(Settings)
    assert found is not None
    return found


def open_client(ctx: typer.Context, retry_for: float = _RETRY_FOR) -> RatchetClient:
    from ratchet_client.client import RatchetClient

    given = settings(ctx)
    return RatchetClient(given.server, given.home, retry_for=retry_for)


def pairs(items: Sequence[str], option: str) -> dict[str, str]:
    """``["k=v", ...]`` as a mapping. Raises ``typer.BadParameter``."""
    out = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{option} takes KEY=VALUE, not {item!r}")
        out[key] = value
    return out


def steps(job: JobView) -> str:
    """``120/600``, or ``120`` where the end is not known."""
    progress = job.progress
    return str(progress.step) if progress.total_steps is None else f"{progress.step}/{progress.total_steps}"


def why(job: JobView) -> str:
    return job.message or job.reason or ""
