"""Commands that change a job: suspend, resume, cancel, preempt, checkpoint, fork, label, delete; and ``wait``."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet_client.cli.commands.submit import apply_overrides, print_warnings
from ratchet_client.cli.shared import completion, output
from ratchet_client.cli.shared.options import (
    RUN,
    SAVED,
    STEER,
    JobId,
    JsonFlag,
    UploadOption,
    open_client,
    parse_pairs,
    parse_phases,
    step_text,
)
from ratchet_contract.plural import pluralize

if TYPE_CHECKING:
    from ratchet_contract.api import views


HookOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Another communication hook, with its default parameters (the job's current hook keeps its parameters); see --set.",
    ),
]


class HookPolicy(StrEnum):
    """The values of ``policy.on_hook_mismatch``, for an option."""

    FAIL = "fail"
    RESET = "reset"
    REDISTRIBUTE = "redistribute"


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=RUN)(wait)
    for command in (suspend, resume, cancel, preempt, fork, label, delete):
        app.command(rich_help_panel=STEER)(command)
    app.command(rich_help_panel=SAVED)(checkpoint)


def suspend(ctx: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Checkpoint, then stop and release the machine; `ratchet resume` continues from there."""
    with open_client(ctx) as client:
        _print_done(client.suspend(job), "will be suspended", as_json)


def resume(
    ctx: typer.Context,
    job: JobId,
    from_step: Annotated[int | None, typer.Option(min=0, help="Resume from the checkpoint of this step.")] = None,
    world: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, metavar="RANKS", help="Continue with another number of ranks (per node). Not exact."
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=1024, help="With --world: on another number of nodes.")
    ] = None,
    hook: HookOption = None,
    sets: Annotated[
        list[str], typer.Option("--set", metavar="hook.KEY=VALUE", help="Change a parameter of the hook.")
    ] = [],  # noqa: B006
    on_hook_mismatch: Annotated[
        HookPolicy | None,
        typer.Option(
            help="Handling of hook state that does not fit, now and on later resumes: policy.on_hook_mismatch."
        ),
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Continue with the current code in DIR. Not exact. (default: the code submitted with the job)",
            show_default=False,
        ),
    ] = None,
    include: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="With --code: files or directories below DIR to copy although ignore files list them; replaces "
            "the job's code.include; may be repeated, '' for none. (default: those of the job)",
        ),
    ] = [],  # noqa: B006
    upload: UploadOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Continue a suspended, failed or cancelled job."""
    changes = _changes(hook, sets)
    if other := sorted(set(changes) - {"hook"}):
        raise typer.BadParameter(f"--set {other[0]}: only the hook can be changed here; `ratchet fork` changes any key")
    if nodes is not None and world is None:
        raise typer.BadParameter("--nodes requires --world, the number of ranks per node")
    if upload is not None and code is None:
        raise typer.BadParameter("--upload requires --code")
    if include and code is None:
        raise typer.BadParameter("--include requires --code")
    policy = None if on_hook_mismatch is None else on_hook_mismatch.value
    with open_client(ctx) as client:
        done = client.resume(
            job, from_step, world=world, nodes=nodes, hook=changes.get("hook"), on_hook_mismatch=policy, code=code,
            include=[name for name in include if name] if include else None, upload=upload, note=output.note,
        )  # fmt: skip
    ranks = (
        ""
        if world is None
        else f" with {pluralize(world, 'rank')}" + ("" if nodes is None else f" on each of {pluralize(nodes, 'node')}")
    )
    if code is not None or world is not None or changes:
        print_warnings(done.warnings)
    by = "" if code is None else f" with the code of {Path(code).expanduser().resolve()}"
    _print_done(done, f"resumes{ranks}{by}" + (f" under {done.hook}" if changes else ""), as_json)


def cancel(ctx: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """End a job. Its checkpoints stay."""
    with open_client(ctx) as client:
        _print_done(client.cancel(job), "will be cancelled", as_json)


def preempt(ctx: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Request that a job saves a checkpoint, stops and returns to the queue."""
    with open_client(ctx) as client:
        _print_done(client.preempt(job), "will be preempted", as_json)


def checkpoint(ctx: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Save a checkpoint now; training continues."""
    with open_client(ctx) as client:
        _print_done(client.checkpoint_now(job), "will save a checkpoint", as_json)


def fork(
    ctx: typer.Context,
    job: JobId,
    checkpoint_id: Annotated[
        str | None, typer.Option("--checkpoint", help="(default: the newest)", autocompletion=completion.checkpoints)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the new job.")] = None,
    hook: HookOption = None,
    sets: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the spec, like task.args.lr=0.1.")
    ] = [],  # noqa: B006
    upload: UploadOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Start a new job from a checkpoint of this one, with a changed spec. Prints the new id on standard output."""
    from ratchet_contract.api.requests import ForkRequest

    changes = _changes(hook, sets)
    with open_client(ctx) as client:
        request = ForkRequest(checkpoint_id=checkpoint_id, name=name, spec=changes)
        new = client.fork(job, request, upload=upload, note=output.note).view
    print_warnings(new.warnings)
    if as_json:
        output.emit(new)
        return
    output.line(new.id)
    output.note(f"forked {new.name} from {new.forked_from}; {new.phase}")


def _changes(hook: str | None, sets: list[str]) -> dict[str, Any]:
    """Return the part of a spec that ``--hook`` and ``--set`` specify. Raise the errors of ``apply_overrides``."""
    changes: dict[str, Any] = {} if hook is None else {"hook": {"name": hook}}
    apply_overrides(changes, sets, {})
    return changes


def label(
    ctx: typer.Context,
    job: JobId,
    labels: Annotated[list[str], typer.Argument(metavar="KEY=VALUE|KEY-", help="KEY- removes the label.")] = [],  # noqa: B006
    priority: Annotated[int | None, typer.Option(min=-1000, max=1000, help="New priority.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Change labels and priority of a job."""
    from ratchet_contract.api.requests import PatchRequest

    removed: dict[str, str | None] = {text[:-1]: None for text in labels if text.endswith("-") and "=" not in text}
    changed = {**removed, **parse_pairs([t for t in labels if "=" in t or not t.endswith("-")], "label")}
    if not changed and priority is None:
        raise typer.BadParameter("give labels (KEY=VALUE or KEY-) or --priority")
    given = ({"labels": changed} if changed else {}) | ({} if priority is None else {"priority": priority})
    with open_client(ctx) as client:
        done = client.patch(job, PatchRequest.model_validate(given))
    labelled = ", ".join(f"{key}={value}" for key, value in sorted(done.labels.items()))
    _print_done(done, f"has priority {done.priority} and {f'labels {labelled}' if labelled else 'no label'}", as_json)


def delete(
    ctx: typer.Context,
    job: JobId,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Leave its checkpoints on disk.")
    ] = False,
    outputs: Annotated[
        bool,
        typer.Option(
            "--outputs",
            help="Also remove the files in its working directory (`ratchet files`). Works later, too: name the deleted job "
            "by its id.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove a job that has ended: its history, logs and, unless kept, checkpoints. The files in its working directory stay
    unless --outputs is specified; the output contains their path."""
    with open_client(ctx) as client:
        result = client.delete(job, keep_checkpoints=keep_checkpoints, outputs=outputs)
    if as_json:
        output.emit(result)
        return
    gone = ["its logs"] + (["its checkpoints"] if not keep_checkpoints else []) + (["its outputs"] if outputs else [])
    output.line(f"{job} is deleted, with {', '.join(gone[:-1])}{' and ' if gone[1:] else ''}{gone[-1]}")
    if result.checkpoints is not None:
        kept = shlex.quote(result.checkpoints)
        output.line(f"its checkpoints stay in {result.checkpoints}")
        output.note(
            f"on the service's machine, check them: ratchet checkpoints verify {kept}; remove them: rm -r {kept}"
        )
    elif keep_checkpoints:
        output.line("it had no checkpoints")
    if result.outputs is not None:
        output.line(f"its outputs stay in {result.outputs}")
        output.note(f"fetch them: ratchet cp {job}: DIR; remove them: ratchet delete {job} --outputs")
    if result.remote is not None:
        output.line(result.remote)


def wait(
    ctx: typer.Context,
    job: JobId,
    until: Annotated[
        list[str],
        typer.Option(
            help="Wait for this phase instead of the end, like RUNNING; may be repeated.",
            autocompletion=completion.phases,
        ),
    ] = [],  # noqa: B006
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help="Timeout in seconds; exit code 7 if it expires.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show progress while waiting; Ctrl-C detaches.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Wait until a job has ended (or is in a phase); the exit code depends on how it ended."""
    from ratchet_client.cli.commands import wait as wait_command
    from ratchet_contract.phases import JobPhase

    phases = frozenset(JobPhase(text) for text in parse_phases(until, "--until"))
    if follow:
        if phases or timeout is not None:
            raise typer.BadParameter("--follow continues until the job ends: leave out --until and --timeout")
        wait_command.follow(ctx, job, as_json=as_json)
    else:
        wait_command.wait(ctx, job, until=phases, deadline=timeout, as_json=as_json)


def _print_done(job: views.JobView, what: str, as_json: bool) -> None:
    """Print the job after an action, as a line of text or as JSON. ``what``: the action's result in words, like "will be
    suspended"."""
    if as_json:
        output.emit(job)
    else:
        became = {"will be cancelled": "CANCELLED", "will be suspended": "SUSPENDED"}.get(what)
        what = f"is {became.lower()}" if became == job.phase else what
        output.line(f"{job.id} {what}; {job.phase}, {step_text(job)}")
