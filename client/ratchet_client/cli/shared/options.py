"""Options, settings, the client, the JOB argument and texts about jobs, which several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet_client.cli.shared import completion
from ratchet_contract.paths import is_job_id
from ratchet_contract.plural import pluralize

if TYPE_CHECKING:
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api.views import JobView

RUN, LOOK, STEER, SAVED, SETUP = (
    "Run and watch jobs", "Inspect a job", "Stop, resume, change", "Checkpoints", "Service and set-up"
)  # fmt: skip
"""The groups of commands in ``ratchet --help``."""

PATIENCE = 120.0
"""Seconds for which following and waiting commands retry while the service is unreachable."""
RETRY_FOR = 3.0
"""Seconds for which a command retries, since the service may be restarting, before it reports that it does not respond."""
UNMANAGED = "unmanaged-script"
"""Code of the warning for a job whose script has no Session."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SAID_WHICH = "ratchet.said-which"
JOB_NAMED = "ratchet.job"
"""Key under which a command's context stores its JOB argument, for hints at errors."""


@dataclass(frozen=True)
class Settings:
    """The global options ``--server`` and ``--home``; None: not set."""

    server: str | None
    home: Path | None


def settings(ctx: typer.Context) -> Settings:
    """Return the global options of the command line."""
    found = ctx.find_object(Settings)
    assert found is not None
    return found


def open_client(ctx: typer.Context, retry_for: float = RETRY_FOR, timeout: float = 30.0) -> RatchetClient:
    """Return a client for the service in use; the caller closes it. ``retry_for``, ``timeout``: as for ``RatchetClient``. May
    print a note on the service. Raise ``Refused`` if the configuration is invalid."""
    from ratchet_client.resources.client import RatchetClient

    given = settings(ctx)
    _note_service(ctx, given)
    return RatchetClient(given.server, given.home, timeout=timeout, retry_for=retry_for)


def _note_service(ctx: typer.Context, given: Settings) -> None:
    """Print a note, once per command, if the service is used only because it is the user's only running one."""
    from ratchet_client.cli.shared import output
    from ratchet_client.http.discovery import RUNNING, find_target

    target = find_target(given.server, given.home)
    if target.home.source == RUNNING and not ctx.resilient_parsing and not ctx.meta.get(_SAID_WHICH):
        ctx.meta[_SAID_WHICH] = True
        output.note(f"using the service of {target.home.value} (set RATCHET_HOME to it to omit this note)")


def job_id_of(ctx: typer.Context, value: str) -> str:
    """Return the id of the job that ``value``, an id or a name, refers to, and store ``value`` in ``ctx``. Raise ``NotFound`` or
    ``AmbiguousName`` if a name does not identify one job. An id is not checked."""
    ctx.meta[JOB_NAMED] = value
    if ctx.resilient_parsing or is_job_id(value):
        return value
    with open_client(ctx) as client:
        return client.job_id(value)


def _newest_job_id_of(ctx: typer.Context, value: str) -> str:
    """Return the id of the job with this id or name. If all jobs of that name have ended, the newest is meant, and a note is
    printed. Raise the errors of ``job_id_of``."""
    from ratchet_client.cli.shared import output
    from ratchet_client.http.errors import AmbiguousName

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
    """Return True if ``value`` has a slash or a dot: no job's id or name has them."""
    return "/" in value or "." in value


def _job_or_path(ctx: typer.Context, value: str) -> str:
    """Return ``value`` unchanged if it is a path, else the id of the job that it refers to. Raise the errors of ``job_id_of``."""
    return value if is_path(value) else job_id_of(ctx, value)


JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print JSON: one document, or one object per line when following.")
]
_JOB = "Job id, or a name that only one job, or only one unfinished job, has."


def _job_argument(callback: Callable[..., Any], text: str = _JOB, metavar: str = "JOB") -> Any:
    """Return the argument that names a job. ``callback``: makes the parameter's value from the text; ``text``: its help."""
    return typer.Argument(
        metavar=metavar, help=text, show_default=False, callback=callback, autocompletion=completion.jobs
    )


JobId = Annotated[str, _job_argument(job_id_of)]
ReadJobId = Annotated[
    str,
    _job_argument(
        _newest_job_id_of, "Job id or name; if several jobs have the name, the one that has not ended, else the newest."
    ),
]
MaybeJobId = Annotated[str | None, _job_argument(lambda ctx, value: None if value is None else job_id_of(ctx, value))]
JobOrPath = Annotated[
    str,
    _job_argument(
        _job_or_path, "Job id or name; or paths of directories, with a slash or a dot in them.", metavar="JOB|PATH"
    ),
]
UploadOption = Annotated[
    bool | None,
    typer.Option(
        "--upload/--no-upload",
        help="Upload code.path from this machine, or take it as a path on the service's machine. (default: upload to a service "
        "on another machine, if the directory exists here)",
        show_default=False,
    ),
]
Phases = Annotated[
    list[str],
    typer.Option("--phase", help="Only jobs in this phase; may be repeated.", autocompletion=completion.phases),
]
Labels = Annotated[list[str], typer.Option("--label", metavar="KEY=VALUE", help="Only jobs with this label.")]
Name = Annotated[str | None, typer.Option("--name", help="Only jobs with this name.", autocompletion=completion.names)]
Since = Annotated[
    str | None,
    typer.Option(metavar="AGE|TIME", help="Start of the interval, like 12h, 30d or 2026-01-31T12:00:00Z."),
]
Until = Annotated[str | None, typer.Option(metavar="AGE|TIME", help="End of the interval. (default: now)")]
Sort = Annotated[
    str | None,
    typer.Option(
        "--sort",
        help="created, name or priority; with - before it descending, like -priority. (default: -created)",
        autocompletion=completion.sorts,
    ),
]


def active_phases() -> list[str]:
    """Return the names of the phases of jobs that run or are queued: neither ended nor suspended."""
    from ratchet_contract.phases import JobPhase

    return [phase.value for phase in JobPhase if not phase.terminal and phase is not JobPhase.SUSPENDED]


def parse_phases(values: Sequence[str], option: str) -> list[str]:
    """Return the phases in upper case. Raise ``typer.BadParameter`` for an unknown one; ``option``: the option's name for the
    message."""
    from ratchet_contract.phases import JobPhase

    known = set(JobPhase)
    if strange := [text for text in values if text.upper() not in known]:
        raise typer.BadParameter(f"{option}: {strange[0]!r} is not a phase; phases: {', '.join(JobPhase)}")
    return [text.upper() for text in values]


def parse_pairs(items: Sequence[str], option: str) -> dict[str, str]:
    """Return ``["k=v", ...]`` as a dict. Raise ``typer.BadParameter`` for another form; ``option``: the option's name for the
    message."""
    out = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{option} takes KEY=VALUE, not {item!r}")
        out[key] = value
    return out


def steps(job: JobView) -> str:
    """Return the job's step as ``120/600``, or ``120`` if the total is unknown; ``-`` for an unmanaged script without a step."""
    progress = job.progress
    if not progress.step and any(warning.code == UNMANAGED for warning in job.warnings):
        return "-"
    return str(progress.step) if progress.total_steps is None else f"{progress.step}/{progress.total_steps}"


def step_text(job: JobView) -> str:
    """Return the job's step as ``step 120/600``, or ``steps not reported`` where ``steps`` returns ``-``."""
    shown = steps(job)
    return "steps not reported" if shown == "-" else f"step {shown}"


def reason_text(job: JobView) -> str:
    """Return the message of the job's phase, else its reason code; "" if it has neither."""
    return job.message or job.reason or ""


def absence_message(job: JobView, what: str, running: str = " yet") -> str:
    """Return ``what``, a text like "no checkpoint", with the reason why the job lacks it, or with ``running`` if it may still
    arrive."""
    if any(warning.code == "unmanaged-script" for warning in job.warnings):
        return f"{what}: {job.spec['script'][0]} has no Session of Ratchet (docs/adoption.md)"
    return f"{what}: the job has ended" if job.phase.terminal else f"{what}{running}"


def queue_position_text(job: JobView) -> str:
    """Return the job's position in the queue, or a lower bound of it, as text; "" if the service reports none."""
    if job.position is not None:
        return f"position {job.position} in the queue"
    return (
        "" if job.ahead_at_least is None else f"{pluralize(job.ahead_at_least, 'job')} or more ahead of it in the queue"
    )


def parse_time(text: str | None, option: str, now: datetime | None = None) -> str | None:
    """Return the RFC 3339 time for ``text``: an age like ``10m``, or a time with a time zone; None for None. Raise
    ``typer.BadParameter`` for other texts. ``option``: its name, for the error."""
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    try:
        if unit in _UNITS and number.isascii() and number.replace(".", "", 1).isdigit():
            return ((now or datetime.now(UTC)) - timedelta(seconds=float(number) * _UNITS[unit])).isoformat()
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        at = None
    if at is None or at.tzinfo is None:
        raise typer.BadParameter(
            f"{option} takes an age like 10m, 2h, 1d or a time like 2026-01-31T12:00:00Z, not {text!r}"
        )
    return at.isoformat()
