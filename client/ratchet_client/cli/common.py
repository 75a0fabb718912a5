"""What several commands share: options, settings, the client, the JOB argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli import complete
from ratchet_contract.paths import is_job_id
from ratchet_contract.plural import counted

if TYPE_CHECKING:
    from ratchet_client.client import RatchetClient
    from ratchet_contract.api import JobView

RUN, LOOK, STEER, SAVED, SETUP = (
    "Run and watch jobs", "Look at a job", "Stop, go on, change", "Checkpoints", "Service and set-up"
)  # fmt: skip
"""The groups of commands in ``ratchet --help``."""

PATIENCE = 120.0
"""Seconds that following and waiting survive without a service."""
RETRY_FOR = 3.0
"""Seconds a command waits for a service that is just being restarted before it says that nothing answers."""
UNMANAGED = "unmanaged-script"
"""Code of the warning of a job whose script has no Session."""
_SAID_WHICH = "ratchet.said-which"
JOB_NAMED = "ratchet.job"
"""Where a command's context keeps the JOB that it was given, for what is said of an error."""


@dataclass(frozen=True)
class Settings:
    server: str | None
    home: Path | None


def settings(ctx: typer.Context) -> Settings:
    found = ctx.find_object(Settings)
    assert found is not None
    return found


def open_client(ctx: typer.Context, retry_for: float = RETRY_FOR, timeout: float = 30.0) -> RatchetClient:
    from ratchet_client.client import RatchetClient

    given = settings(ctx)
    _say_which(ctx, given)
    return RatchetClient(given.server, given.home, timeout=timeout, retry_for=retry_for)


def _say_which(ctx: typer.Context, given: Settings) -> None:
    """Once for a command: a service that nobody named was taken, and it is not that of this directory."""
    from ratchet_client.cli import output
    from ratchet_client.discovery import RUNNING, find_target

    target = find_target(given.server, given.home)
    if target.home.source == RUNNING and not ctx.resilient_parsing and not ctx.meta.get(_SAID_WHICH):
        ctx.meta[_SAID_WHICH] = True
        output.note(f"using the service of {target.home.value} (where RATCHET_HOME names it, this is not said)")


def job_id_of(ctx: typer.Context, value: str) -> str:
    """The id of the job that ``value`` names. An id is taken as it is, without a request.

    Raises ``NotFound``, and ``AmbiguousName`` as the client's ``job_id`` does.
    """
    ctx.meta[JOB_NAMED] = value
    if ctx.resilient_parsing or is_job_id(value):
        return value
    with open_client(ctx) as client:
        return client.job_id(value)


def _newest_job_id_of(ctx: typer.Context, value: str) -> str:
    """The same for a command that only reads: of several jobs that have all ended it takes the newest, and says so."""
    from ratchet_client.cli import output
    from ratchet_client.errors import AmbiguousName

    try:
        return job_id_of(ctx, value)
    except AmbiguousName as error:
        found: list[JobView] = error.extra["jobs"]
        if not all(job.phase.terminal for job in found):
            raise
        newest = found[0].id
        output.note(
            f"{len(found)} jobs have the name {value}; this is the newest, {newest}; all: ratchet list --name {value}"
        )
        return newest


def is_path(value: str) -> bool:
    """Neither a job's id nor its name has a slash or a dot."""
    return "/" in value or "." in value


def _job_or_path(ctx: typer.Context, value: str) -> str:
    return value if is_path(value) else job_id_of(ctx, value)


JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print JSON: one document, or one object per line when following.")
]
_JOB = "Job id, or a name that one job has, or one that has not ended."
JobId = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help=_JOB,
        show_default=False,
        callback=job_id_of,
        autocompletion=complete.jobs,
    ),
]
ReadJobId = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Job id, or a name: of several jobs the one that has not ended, else the newest.",
        show_default=False,
        callback=_newest_job_id_of,
        autocompletion=complete.jobs,
    ),
]
MaybeJobId = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help=_JOB,
        show_default=False,
        callback=lambda ctx, value: None if value is None else job_id_of(ctx, value),
        autocompletion=complete.jobs,
    ),
]
JobOrPath = Annotated[
    str,
    typer.Argument(
        metavar="JOB|PATH",
        help="Job id, or a name; or directories, with a slash or a dot in them.",
        show_default=False,
        callback=_job_or_path,
        autocompletion=complete.jobs,
    ),
]
UploadOption = Annotated[
    bool | None,
    typer.Option(
        "--upload/--no-upload",
        help="Send the directory code.path of this machine; or it is one of the service's machine. (default: sent to a service "
        "on another machine, if there is such a directory here)",
        show_default=False,
    ),
]
Phases = Annotated[
    list[str],
    typer.Option("--phase", help="Only jobs in this phase; may be repeated.", autocompletion=complete.phases),
]
Labels = Annotated[list[str], typer.Option("--label", metavar="KEY=VALUE", help="Only jobs with this label.")]
Name = Annotated[str | None, typer.Option("--name", help="Only jobs of this name.", autocompletion=complete.names)]
Sort = Annotated[
    str | None,
    typer.Option(
        "--sort",
        help="created, name or priority; with - before it descending, like -priority. (default: -created)",
        autocompletion=complete.sorts,
    ),
]


def active_phases() -> list[str]:
    """Of jobs that run or wait for their turn: neither ended nor suspended."""
    from ratchet_contract.phases import JobPhase

    return [phase.value for phase in JobPhase if not phase.terminal and phase is not JobPhase.SUSPENDED]


def known_phases(given: Sequence[str], option: str) -> list[str]:
    """As the service spells them. Raises ``typer.BadParameter``."""
    from ratchet_contract.phases import JobPhase

    known = set(JobPhase)
    if strange := [text for text in given if text.upper() not in known]:
        raise typer.BadParameter(f"{option}: {strange[0]!r} is no phase; phases: {', '.join(JobPhase)}")
    return [text.upper() for text in given]


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
    """``120/600``, or ``120`` where the end is not known; ``-`` of a script without a Session, which reports none."""
    progress = job.progress
    if not progress.step and any(warning.code == UNMANAGED for warning in job.warnings):
        return "-"
    return str(progress.step) if progress.total_steps is None else f"{progress.step}/{progress.total_steps}"


def steps_words(job: JobView) -> str:
    """``step 120/600``, or ``steps not reported``."""
    shown = steps(job)
    return "steps not reported" if shown == "-" else f"step {shown}"


def why(job: JobView) -> str:
    return job.message or job.reason or ""


def absent(job: JobView, what: str, running: str = " yet") -> str:
    """Why a job has nothing of what a Session reports or saves: ``what``, then ``running`` where it may still come."""
    if any(warning.code == "unmanaged-script" for warning in job.warnings):
        return f"{what}: {job.spec['script'][0]} has no Session of Ratchet (docs/adoption.md)"
    return f"{what}: the job has ended" if job.phase.terminal else f"{what}{running}"


def place_words(job: JobView) -> str:
    """``position 12 in the queue``; empty where it has none, or the service does not tell."""
    if job.position is not None:
        return f"position {job.position} in the queue"
    return (
        "" if job.ahead_at_least is None else f"{counted(job.ahead_at_least, 'job')} or more ahead of it in the queue"
    )
