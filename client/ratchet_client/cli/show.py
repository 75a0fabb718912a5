"""Commands that only read: list, get, hook, attempts, checkpoints (and their verification and pins), hooks."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import JobId, JsonFlag, open_client, pairs, steps, why
from ratchet_client.cli.exits import Exit

if TYPE_CHECKING:
    from ratchet_contract import api


class CheckpointAction(StrEnum):
    SHOW = "show"
    VERIFY = "verify"
    PIN = "pin"
    UNPIN = "unpin"


def register(app: typer.Typer) -> None:
    app.command("list")(list_jobs)
    for command in (get, hook, attempts, checkpoints, hooks):
        app.command()(command)


def list_jobs(
    ctx: typer.Context,
    phase: Annotated[list[str], typer.Option(help="Only jobs in this phase; may be repeated.")] = [],  # noqa: B006
    label: Annotated[list[str], typer.Option(metavar="KEY=VALUE", help="Only jobs with this label.")] = [],  # noqa: B006
    name: Annotated[str | None, typer.Option(help="Only jobs of this name.")] = None,
    sort: Annotated[
        str | None, typer.Option(help="created, name or priority; with - before it descending, like name or -priority.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many jobs.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """List jobs, newest first."""
    from itertools import islice

    with open_client(ctx) as client:
        found = client.jobs(
            phase=[p.upper() for p in phase],
            label=pairs(label, "--label"),
            name=name,
            sort=sort,
            page_size=min(limit, 100),
        )
        jobs = list(islice(found, limit))
    if as_json:
        output.emit(jobs)
        return
    output.table(
        ["ID", "NAME", "PHASE", "HOOK", "STEP", "ATTEMPT", "AGE", "WHY"],
        [[j.id, j.name, str(j.phase), j.hook, steps(j), str(j.epoch), output.age(j.created_at), why(j)] for j in jobs],
        right=["STEP", "ATTEMPT", "AGE"], empty="no jobs; submit one with: ratchet submit FILE",
    )  # fmt: skip


def get(ctx: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Show one job."""
    with open_client(ctx) as client:
        found = client.job(job)
    if as_json:
        output.emit(found)
        return
    budgets = found.budgets
    output.fields(
        [
            ("id", found.id), ("name", found.name), ("phase", found.phase),
            ("desired", found.desired if found.desired != "run" else None), ("reason", found.reason),
            ("message", found.message), ("step", steps(found)), ("steps at risk", found.progress.steps_at_risk),
            ("attempt", found.epoch), ("hook", found.hook), ("device", found.resolved.device),
            ("backend", found.resolved.backend), ("threads per rank", found.resolved.threads_per_rank),
            ("last checkpoint", found.last_checkpoint), ("forked from", found.forked_from),
            ("failures", f"{budgets.failures} of {budgets.max_failures}"),
            ("preemptions", f"{budgets.preemptions} of {_limit(budgets.max_preemptions)}"),
            ("labels", ", ".join(f"{k}={v}" for k, v in sorted(found.labels.items()))), ("priority", found.priority),
            ("created", output.moment(found.created_at)), ("started", output.moment(found.started_at)),
            ("not before", output.moment(found.not_before)), ("ended", output.moment(found.ended_at)),
        ]
    )  # fmt: skip
    for warning in found.warnings:
        output.line(f"warning: {warning.pointer or '/'}: {warning.detail} [{warning.code}]")


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def hook(ctx: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Show the communication hook of a job: phase, iteration, compression rate, residuals."""
    with open_client(ctx) as client:
        view = client.hook(job)
    if as_json:
        output.emit(view)
        return
    rate = None if view.compression_rate is None else f"{view.compression_rate:.3g}x"
    output.fields(
        [
            ("hook", view.name), ("wrapper", view.wrapper),
            ("parameters", ", ".join(f"{k}={v}" for k, v in view.parameters.items() if k not in ("name", "wrapper"))),
            ("phase", view.phase), ("iteration", view.iteration), ("compression rate", rate),
            ("elements", _from_to(view.elements_before, view.elements_after)),
            ("bytes", _from_to(view.bytes_before, view.bytes_after)),
            ("memory", output.size(view.memory_bytes)), ("at step", view.step),
            ("iteration in checkpoint", view.checkpoint_iteration), ("checkpoint", view.checkpoint_id),
            ("updated", output.moment(view.updated_at)),
        ]
        + [(f"residual norm, rank {rank}", norm) for rank, norm in sorted(view.residual_norm.items())]
    )  # fmt: skip
    if view.phase is None:
        output.note("the hook has not reported yet")


def _from_to(before: int | None, after: int | None) -> str | None:
    return None if before is None or after is None else f"{before} -> {after}"


def attempts(ctx: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Show every launch of a job: how it ended and why, what it resumed from, steps done and lost."""
    with open_client(ctx) as client:
        found = list(client.attempts(job))[::-1]
    if as_json:
        output.emit(found)
        return
    output.table(
        ["ATTEMPT", "PHASE", "OUTCOME", "CAUSE", "BASE", "LAST", "DONE", "LOST", "RESUMED", "TIME", "MESSAGE"],
        [_attempt_row(a) for a in found],
        right=["ATTEMPT", "BASE", "LAST", "DONE", "LOST"], empty="no attempt yet",
    )  # fmt: skip
    for attempt in found:
        report = attempt.resume_report
        if report is None or report.verdict != "not-exact":
            continue
        output.note(f"attempt {attempt.number} did not resume exactly:")
        for part in report.components:
            if part.status != "exact":
                output.note(f"  {part.component}, rank {part.rank}: {part.status}: {part.reason}")
        for fact in report.differences:
            output.note(f"  {fact.key}: was {fact.recorded!r}, is {fact.current!r}")


def _attempt_row(a: api.AttemptView) -> list[str]:
    return [
        str(a.number), str(a.phase), output.dash(a.outcome), output.dash(a.cause),
        output.dash(a.base.step if a.base else None), str(a.last_step), str(a.steps_done), output.dash(a.steps_lost),
        a.resume_report.verdict if a.resume_report else "-", output.span(a.created_at, a.ended_at), a.message or "",
    ]  # fmt: skip


def checkpoints(
    ctx: typer.Context,
    job: JobId,
    action: Annotated[CheckpointAction | None, typer.Argument(help="What to do with CHECKPOINT.")] = None,
    checkpoint: Annotated[str | None, typer.Argument(metavar="CHECKPOINT", help="Checkpoint id.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List a job's checkpoints; show, verify (reads every byte), pin (kept for ever) or unpin one of them."""
    if action is not None and checkpoint is None:
        raise typer.BadParameter(f"{action} needs a checkpoint id: ratchet checkpoints {job} {action} CHECKPOINT")
    if action is None or checkpoint is None:
        _list_checkpoints(ctx, job, as_json)
        return
    with open_client(ctx) as client:
        if action is CheckpointAction.VERIFY:
            result = client.verify(job, checkpoint)
            if as_json:
                output.emit(result)
            else:
                output.line(
                    f"{result.id}: {result.verification} ({result.bytes_checked} bytes in {result.seconds:.2f} s)"
                )
            if result.verification == "damaged":
                output.note(f"{result.id} is damaged: {result.error}")
                raise typer.Exit(Exit.JOB_FAILED)
        elif action is CheckpointAction.SHOW:
            detail = client.checkpoint(job, checkpoint)
            if as_json:
                output.emit(detail)
            else:
                output.line(json.dumps(detail.model_dump(mode="json"), indent=2, ensure_ascii=False))
        else:
            view = client.pin(job, checkpoint, pinned=action is CheckpointAction.PIN)
            if as_json:
                output.emit(view)
            else:
                output.line(f"{view.id}: {'pinned' if view.pinned else 'not pinned'}")


def _list_checkpoints(ctx: typer.Context, job: str, as_json: bool) -> None:
    with open_client(ctx) as client:
        found = list(client.checkpoints(job))
    if as_json:
        output.emit(found)
        return
    output.table(
        ["ID", "STEP", "ATTEMPT", "STATE", "REASON", "SIZE", "VERIFIED", "MARKS", "AGE", "DIGEST"],
        [_checkpoint_row(c) for c in found],
        right=["STEP", "ATTEMPT", "SIZE", "AGE"], empty="no checkpoint yet",
    )  # fmt: skip


def _checkpoint_row(c: api.CheckpointView) -> list[str]:
    marks = [word for word, there in (("final", c.finished), ("pinned", c.pinned), ("adopted", c.adopted)) if there]
    return [
        c.id, str(c.step), str(c.epoch), c.state, c.reason, output.size(c.size), output.dash(c.verification),
        ",".join(marks) or "-", output.age(c.created_at), c.digest[:16],
    ]  # fmt: skip


def hooks(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show this hook's parameters.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the communication hooks, or show the parameters of one."""
    with open_client(ctx) as client:
        if name is None:
            _list_hooks(client.hooks(), as_json)
            return
        info = client.hook_info(name)
    if as_json:
        output.emit(info)
        return
    output.fields(
        [("name", info.name), ("title", info.title), ("available", "yes" if info.available else "not yet"),
         ("keeps state", "yes" if info.stateful else "no"), ("replicas", info.replicas),
         ("back ends", ", ".join(info.backends)), ("wrappers", ", ".join(info.wrappers))]
    )  # fmt: skip
    for warning in info.warnings:
        output.line(f"warning: {warning}")
    properties = (info.parameters or {}).get("properties", {})
    rows = [
        [key, json.dumps(schema.get("default")), schema.get("description", "")]
        for key, schema in properties.items()
        if key not in ("name", "wrapper")
    ]
    if rows:
        output.line()
        output.table(["PARAMETER", "DEFAULT", "MEANING"], rows)


def _list_hooks(found: list[api.HookInfo], as_json: bool) -> None:
    if as_json:
        output.emit(found)
        return
    output.table(
        ["NAME", "AVAILABLE", "STATE", "BACK ENDS", "TITLE"],
        [[h.name, "yes" if h.available else "not yet", "yes" if h.stateful else "no", ",".join(h.backends) or "-", h.title]
         for h in found],
    )  # fmt: skip
