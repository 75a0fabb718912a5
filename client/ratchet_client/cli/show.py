"""Commands that only read: list, get, attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import (
    LOOK,
    JsonFlag,
    Labels,
    Name,
    Phases,
    ReadJobId,
    Sort,
    active_phases,
    known_phases,
    open_client,
    pairs,
    place_words,
    steps,
    why,
)
from ratchet_client.cli.metrics import last_words
from ratchet_contract.access import LOCAL_OWNER
from ratchet_contract.plural import counted, short_digests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratchet_contract import api

_PARTS: Final = {
    "useful": "useful", "queued": "queued", "launching": "launching", "lost": "lost", "stall": "saving",
    "stopping": "stopping", "unseen": "unaccounted",
}  # fmt: skip

_STEPS: Final = {
    "BASE": "started from", "LAST": "last one", "DONE": "by this attempt", "LOST": "in no checkpoint and done again",
}  # fmt: skip
"""Columns of ``attempts``."""


def register(app: typer.Typer) -> None:
    app.command("list", rich_help_panel=LOOK)(list_jobs)
    for command in (get, attempts):
        app.command(rich_help_panel=LOOK)(command)


def list_jobs(
    ctx: typer.Context,
    phase: Phases = [],  # noqa: B006
    label: Labels = [],  # noqa: B006
    name: Name = None,
    active: Annotated[bool, typer.Option("--active", help="Only jobs that run or wait for their turn.")] = False,
    owner: Annotated[str | None, typer.Option(help="Only jobs of this owner.")] = None,
    sort: Sort = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many jobs.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """List jobs, newest first."""
    from itertools import islice

    if active and phase:
        raise typer.BadParameter("give --active or --phase, not both")
    with open_client(ctx) as client:
        found = client.jobs(
            phase=active_phases() if active else known_phases(phase, "--phase"),
            label=pairs(label, "--label"),
            name=name,
            sort=sort,
            owner=owner,
            page_size=min(limit, 100),
        )
        jobs = list(islice(found, limit))
    if as_json:
        output.emit(jobs)
        return
    team = any(job.owner != LOCAL_OWNER for job in jobs)
    output.table(
        ["ID", "NAME", *(["OWNER"] if team else []), "PHASE", "HOOK", "STEP", "ATTEMPT", "AGE", "WHY"],
        [[j.id, j.name, *([j.owner] if team else []), str(j.phase), j.hook, steps(j), str(j.attempt), output.age(j.created_at),
          why(j)] for j in jobs],
        right=["STEP", "ATTEMPT", "AGE"], drop=["HOOK", "ATTEMPT", "AGE", "STEP", "OWNER", "WHY", "NAME"],
        cut="WHY",
        empty="no job fits" if phase or label or name or active or owner else "no jobs; submit one with: ratchet submit FILE",
    )  # fmt: skip


def get(ctx: typer.Context, job: ReadJobId, as_json: JsonFlag = False) -> None:
    """Show one job."""
    with open_client(ctx) as client:
        found = client.view(job)
        newest = client.attempt(job) if found.attempt and not as_json else None
        metrics = last_words(client, job) if found.attempt and not as_json else ""
    if as_json:
        output.emit(found)
        return
    budgets, unmanaged = found.budgets, steps(found) == "-"
    output.fields(
        [
            ("id", found.id), ("name", found.name), ("owner", found.owner if found.owner != LOCAL_OWNER else None),
            ("labels", ", ".join(f"{k}={v}" for k, v in sorted(found.labels.items()))),
        ],
        [
            ("phase", found.phase), ("desired", found.desired if found.desired != "run" else None),
            ("reason", found.reason), ("message", found.message), ("queue", place_words(found)),
            ("priority", found.priority), ("not before", output.moment(found.not_before)),
            ("warnings", _warnings(found.warnings)),
        ],
        [
            ("step", steps(found)), ("last metrics", metrics),
            ("steps per second", _rate(found.progress.steps_per_second)), ("last checkpoint", found.last_checkpoint),
            ("steps at risk", None if found.phase.terminal or unmanaged else found.progress.steps_at_risk),
        ],
        [
            ("attempt", found.attempt), ("resumed", None if newest is None else newest.proof),
            ("failures", _of(budgets.failures, budgets.max_failures) + ("" if unmanaged else " without progress")),
            ("preemptions", _of(budgets.preemptions, budgets.max_preemptions)),
            ("goodput", None if unmanaged else _goodput(found.goodput)),
        ],
        [
            ("hook", found.hook), ("device", found.resolved.device), ("backend", found.resolved.backend),
            ("threads per rank", found.resolved.threads_per_rank), ("git", commit_words(found.spec)),
            ("packages", _packages(found.environment)), ("forked from", found.forked_from),
            ("adopted from", found.adopted_from),
        ],
        [
            ("working directory", found.work_dir), ("created", output.moment(found.created_at)),
            ("started", output.moment(found.started_at)), ("ended", output.moment(found.ended_at)),
        ],
    )  # fmt: skip


def _warnings(found: list[api.Warning_]) -> str | None:
    """Their codes and places: the sentences were printed when the job was submitted."""
    if not found:
        return None
    return ", ".join(f"{w.code} ({w.pointer or '/'})" for w in found) + "; in full: --json"


def commit_words(spec: dict[str, Any]) -> str | None:
    """The commit of its code, and a digest of what differs from it."""
    git = (spec.get("code") or {}).get("git")
    if git is None:
        return None
    if git["commit"] is None:
        return f"unknown: {git['reason']}"
    if not git["changed"]:
        return str(git["commit"])
    files = counted(git["changed"], "file")
    return f"{git['commit']} + uncommitted changes in {files} (sha256:{git['diff'][:16]})"


def _packages(found: api.EnvironmentView | None) -> str | None:
    """`--json` has the list."""
    return None if found is None else f"{len(found.packages)}, digest {found.digest[:16]}"


def _goodput(found: api.GoodputView | None) -> str | None:
    """The share of its time that counts, and where the rest went."""
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


def _of(count: int, limit: int | None) -> str:
    return f"{count} (no limit)" if limit is None else f"{count} of {limit}"


def attempts(ctx: typer.Context, job: ReadJobId, as_json: JsonFlag = False) -> None:
    """Show every launch of a job: how it ended and why, what it resumed from, steps done and lost.

    BASE is the step that it started from, LAST its last one, DONE how many it did. LOST: those of them that no checkpoint has,
    so that a later attempt does them again. RESUMED: whether it went on with the same bits, and whether redone steps prove it.
    """
    with open_client(ctx) as client:
        found = client.attempts(job)
    if as_json:
        output.emit(found)
        return
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
        for text in [*([attempt.message or ""] if "MESSAGE" in missing else []), *_remarks(attempt)]:
            told.setdefault(short_digests(text), []).append(attempt.number)
    for text, numbers in told.items():
        if text:
            output.note(output.broken(f"{_named(numbers)}: {text}"))


def _named(numbers: list[int]) -> str:
    """``attempt 3``, ``attempts 2, 3``."""
    return f"attempt{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _remarks(attempt: api.AttemptView) -> Iterator[str]:
    """What the table does not say of an attempt, in sentences that other attempts may have, too."""
    report, redone = attempt.resume_report, attempt.redone
    yield from report.notes if report is not None else ()
    if attempt.notice_used is not None and attempt.notice_seconds is not None:
        given, used = (output.duration(s) for s in (attempt.notice_seconds, attempt.notice_used))
        yield f"stopped {used} after it was asked to, of the {given} that it had"
    inexact = report is not None and report.verdict == "not-exact"
    if redone.reason is not None:
        why = "" if inexact and redone.reason.startswith("the resume is not exact") else f": {redone.reason}"
        yield f"{redone.compared} of {counted(redone.steps, 'redone step')} compared{why}"
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


def _attempt_row(a: api.AttemptView) -> list[str]:
    unmanaged = a.resume_report is not None and a.resume_report.verdict == "unmanaged"  # it reports no steps
    steps = ["-"] * 3 if unmanaged else [str(a.last_step), str(a.steps_done), output.dash(a.steps_lost)]
    return [
        str(a.number), str(a.phase), output.dash(a.outcome), output.dash(a.cause),
        output.dash(a.base.step if a.base else None), *steps, output.dash(a.proof),
        output.span(a.created_at, a.ended_at), a.message or "",
    ]  # fmt: skip
