"""The commands ``ratchet list``, ``get`` and ``attempts``: show jobs, one job, and a job's attempts."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ratchet_client.cli.commands.metrics import last_values_text
from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import (
    LOOK,
    JsonFlag,
    Labels,
    Name,
    Phases,
    ReadJobId,
    Sort,
    active_phases,
    open_client,
    parse_pairs,
    parse_phases,
    queue_position_text,
    reason_text,
    steps,
)
from ratchet_contract.phases import EventType
from ratchet_contract.plural import pluralize, short_digests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api import views

_PARTS: Final = {
    "useful": "useful", "queued": "queued", "launching": "launching", "lost": "lost", "stall": "saving",
    "stopping": "stopping", "unseen": "unaccounted",
}  # fmt: skip

_STEPS: Final = {
    "BASE": "started from", "LAST": "last one that a rank finished", "DONE": "by this attempt",
    "LOST": "in no checkpoint and done again",
}  # fmt: skip
"""Columns of ``attempts`` and their meanings."""
_STARTS: Final = 100
"""Starts of ranks that ``attempts`` reads: one page."""


def register(app: typer.Typer) -> None:
    app.command("list", rich_help_panel=LOOK)(list_jobs)
    for command in (get, attempts):
        app.command(rich_help_panel=LOOK)(command)


def list_jobs(
    ctx: typer.Context,
    phase: Phases = [],  # noqa: B006
    label: Labels = [],  # noqa: B006
    name: Name = None,
    active: Annotated[bool, typer.Option("--active", help="Only running and queued jobs.")] = False,
    owner: Annotated[str | None, typer.Option(help="Only jobs of this owner.")] = None,
    sort: Sort = None,
    limit: Annotated[int, typer.Option(min=1, max=10**9, help="Maximum number of jobs.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """List jobs, newest first."""
    from itertools import islice

    if active and phase:
        raise typer.BadParameter("give --active or --phase, not both")
    with open_client(ctx) as client:
        found = client.jobs(
            phase=active_phases() if active else parse_phases(phase, "--phase"),
            label=parse_pairs(label, "--label"),
            name=name,
            sort=sort,
            owner=owner,
            page_size=min(limit, 100),
        )
        jobs = list(islice(found, limit))
    if as_json:
        output.emit(jobs)
        return
    from ratchet_contract.api.roles import LOCAL_OWNER

    team = any(job.owner != LOCAL_OWNER for job in jobs)
    output.table(
        ["ID", "NAME", *(["OWNER"] if team else []), "PHASE", "HOOK", "STEP", "ATTEMPT", "AGE", "WHY"],
        [[j.id, j.name, *([j.owner] if team else []), str(j.phase), j.hook, steps(j), str(j.attempt), output.age(j.created_at),
          reason_text(j)] for j in jobs],
        right=["STEP", "ATTEMPT", "AGE"], drop=["HOOK", "ATTEMPT", "AGE", "STEP", "OWNER", "WHY", "NAME"],
        cut="WHY",
        empty="no job matches" if phase or label or name or active or owner else "no jobs; submit one with: ratchet submit FILE",
    )  # fmt: skip


def get(ctx: typer.Context, job: ReadJobId, as_json: JsonFlag = False) -> None:
    """Show one job."""
    with open_client(ctx) as client:
        found = client.view(job)
        newest = client.attempt(job) if found.attempt and not as_json else None
        metrics = last_values_text(client, job) if found.attempt and not as_json else ""
    if as_json:
        output.emit(found)
        return
    from ratchet_contract.api.roles import LOCAL_OWNER

    budgets, unmanaged = found.budgets, steps(found) == "-"
    output.fields(
        [
            ("id", found.id), ("name", found.name), ("owner", found.owner if found.owner != LOCAL_OWNER else None),
            ("labels", ", ".join(f"{k}={v}" for k, v in sorted(found.labels.items()))),
        ],
        [
            ("phase", found.phase), ("desired", found.desired if found.desired != "run" else None),
            ("reason", found.reason), ("message", found.message), ("queue", queue_position_text(found)),
            ("priority", found.priority), ("not before", output.format_time(found.not_before)),
            ("warnings", _warnings_text(found.warnings)),
        ],
        [
            ("step", steps(found)), ("last metrics", metrics),
            ("steps per second", _rate(found.progress.steps_per_second)), ("last checkpoint", found.last_checkpoint),
            ("steps at risk", None if found.phase.terminal or unmanaged else found.progress.steps_at_risk),
        ],
        [
            ("attempt", found.attempt), ("resumed", None if newest is None else newest.proof),
            ("failures", _count_of_limit(budgets.failures, budgets.max_failures) + ("" if unmanaged else " without progress")),
            ("preemptions", _count_of_limit(budgets.preemptions, budgets.max_preemptions)),
            ("goodput", None if unmanaged else _goodput_text(found.goodput)),
        ],
        [
            ("hook", found.hook), ("device", found.resolved.device), ("backend", found.resolved.backend),
            ("threads per rank", found.resolved.threads_per_rank), ("git", commit_text(found.spec)),
            ("packages", _packages_text(found.environment)), ("forked from", found.forked_from),
            ("adopted from", found.adopted_from),
        ],
        [
            ("working directory", found.work_dir), ("created", output.format_time(found.created_at)),
            ("started", output.format_time(found.started_at)), ("ended", output.format_time(found.ended_at)),
        ],
    )  # fmt: skip


def _warnings_text(found: list[views.Warning_]) -> str | None:
    """Return the codes and pointers of the warnings, and that ``--json`` prints their full texts; None if there are none."""
    if not found:
        return None
    return ", ".join(f"{w.code} ({w.pointer or '/'})" for w in found) + "; in full: --json"


def commit_text(spec: dict[str, Any]) -> str | None:
    """Return the git commit of the job's code, and its uncommitted changes, or why they are unknown, as text. None if the spec
    does not have this information."""
    git = (spec.get("code") or {}).get("git")
    if git is None:
        return None
    if git["commit"] is None:
        return f"unknown: {git['reason']}"
    if not git["changed"]:
        return str(git["commit"])
    files = pluralize(git["changed"], "file")
    return f"{git['commit']} + uncommitted changes in {files} (sha256:{git['diff'][:16]})"


def _packages_text(found: views.EnvironmentView | None) -> str | None:
    """Return the number of packages and their digest; None if they are unknown. ``--json`` prints the list."""
    return None if found is None else f"{len(found.packages)}, digest {found.digest[:16]}"


def _goodput_text(found: views.GoodputView | None) -> str | None:
    """Return the useful share of the job's wall time, and where the time went, as text. None if ``found`` is None."""
    if found is None:
        return None
    seconds = found.model_dump()
    parts = [
        f"{word} {output.duration(seconds[f'{name}_seconds'])}"
        for name, word in _PARTS.items()
        if seconds[f"{name}_seconds"] >= 0.05
    ]
    share = "unknown" if found.goodput is None else f"{found.goodput:.1%}"
    return f"{share} of {output.duration(found.wall_seconds)}" + (f": {', '.join(parts)}" if parts else "")


def _rate(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _count_of_limit(count: int, limit: int | None) -> str:
    """Return ``count`` with its limit, like ``1 of 3``; a ``limit`` of None means no limit."""
    return f"{count} (no limit)" if limit is None else f"{count} of {limit}"


def attempts(ctx: typer.Context, job: ReadJobId, as_json: JsonFlag = False) -> None:
    """Show every launch of a job: how it ended and why, what it resumed from, steps done and lost.

    BASE: the step from which the launch started. LAST: the last step that one of its ranks finished. DONE: the number of its
    steps. LOST: how many of these steps are in no checkpoint; a later attempt redoes them. RESUMED: whether the launch continued
    with the same bits, and whether redone steps confirm this. Lines below the table say how the newest launches started: in a
    parked agent, or cold, and why.
    """
    with open_client(ctx) as client:
        found = client.attempts(job)
        if as_json:
            output.emit(found)
            return
        starts = _starts(client, found[0].job_id) if found else {}
    missing = output.table(
        ["ATTEMPT", "PHASE", "OUTCOME", "CAUSE", "BASE", "LAST", "DONE", "LOST", "RESUMED", "TIME", "MESSAGE"],
        [_attempt_row(a) for a in found],
        right=["ATTEMPT", "BASE", "LAST", "DONE", "LOST"],
        drop=["MESSAGE", "PHASE", "OUTCOME", "TIME", "DONE", "BASE", "LAST", "LOST"], empty="no attempt yet",
    )  # fmt: skip
    meanings = [f"{column} {meaning}" for column, meaning in _STEPS.items() if column not in missing]
    if found and meanings:
        output.note(f"steps: {', '.join(meanings)}")
    told: dict[str, list[int]] = {}
    for attempt in found:
        message = attempt.message if "MESSAGE" in missing else None
        for text in [message or "", starts.get(attempt.number, ""), *_remarks(attempt)]:
            told.setdefault(short_digests(text), []).append(attempt.number)
    for text, numbers in told.items():
        if text:
            output.note(output.wrap_text(f"{_attempts_text(numbers)}: {text}"))


def _starts(client: RatchetClient, job_id: str) -> dict[int, str]:
    """Return by attempt how it started: ``parked start``, or ``cold start`` and why. Attempts whose launcher parks no agents, and
    those that are older than the newest events of this kind, are left out."""
    newest = islice(client.events(job_id, type=EventType.RANK_STARTED, sort="-id", page_size=_STARTS), _STARTS)
    starts = {}
    for event in newest:
        if event.attempt is not None and (start := event.data.get("start")):
            why = event.data.get("why")
            starts[event.attempt] = f"{start} start" + (f": {why}" if why else "")
    return starts


def _attempts_text(numbers: list[int]) -> str:
    """Return the numbers of attempts as text: ``attempt 3``, ``attempts 2, 3``."""
    return f"attempt{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _remarks(attempt: views.AttemptView) -> Iterator[str]:
    """Yield sentences about an attempt that the table does not show, such as what an inexact resume lost."""
    report, redone = attempt.resume_report, attempt.redone
    yield from report.notes if report is not None else ()
    if attempt.notice_used is not None and attempt.notice_seconds is not None:
        given, used = (output.duration(s) for s in (attempt.notice_seconds, attempt.notice_used))
        yield f"stopped {used} after the stop request, of {given} allowed"
    if attempt.excluded_nodes:
        yield f"not started on {', '.join(attempt.excluded_nodes)} (policy.exclude_nodes; events: node-excluded)"
    for slow in attempt.stragglers:
        where = "" if slow.host is None else f" on {slow.host}"
        yield f"the other ranks waited for rank {slow.rank}{where} for up to {slow.share:.0%} of a step"
    inexact = report is not None and report.verdict == "not-exact"
    if redone.reason is not None:
        why = "" if inexact and redone.reason.startswith("the resume is not exact") else f": {redone.reason}"
        yield f"{redone.compared} of {pluralize(redone.steps, 'redone step')} compared{why}"
    if attempt.metrics_differ:
        yield f"logged values that differ in redone steps that are equal: {', '.join(attempt.metrics_differ)}"
    if report is None or not inexact:
        return
    parts: dict[str, list[int]] = {}
    for part in report.components:
        if part.status != "exact":
            parts.setdefault(f"{part.component}: {part.status}: {part.reason}", []).append(part.rank)
    for text, ranks in parts.items():
        of = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        yield f"did not resume exactly: {of}: {text}"
    for fact in report.differences:
        yield f"did not resume exactly: {fact.key} was {fact.recorded!r}, is {fact.current!r}"


def _attempt_row(a: views.AttemptView) -> list[str]:
    """Return the table's cells for one attempt."""
    unmanaged = a.resume_report is not None and a.resume_report.verdict == "unmanaged"  # it reports no steps
    steps = ["-"] * 3 if unmanaged else [str(a.last_step), str(a.steps_done), output.dash(a.steps_lost)]
    return [
        str(a.number), str(a.phase), output.dash(a.outcome), output.dash(a.cause),
        output.dash(a.base.step if a.base else None), *steps, output.dash(a.proof),
        output.span(a.created_at, a.ended_at), a.message or "",
    ]  # fmt: skip
