"""The commands ``ratchet checkpoints``: list, show, verify, export, pin, unpin and prune a job's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ratchet_client.cli.commands.serve import exec_module
from ratchet_client.cli.shared import completion, output
from ratchet_client.cli.shared.exit_codes import Exit
from ratchet_client.cli.shared.options import (
    SAVED,
    JobId,
    JobOrPath,
    JsonFlag,
    ReadJobId,
    absence_message,
    is_path,
    open_client,
)
from ratchet_client.cli.shared.signals import interruptible
from ratchet_contract.plural import pluralize

if TYPE_CHECKING:
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api import views

ExportFormat = Literal["safetensors", "torch", "dcp"]
_VERIFY_SECONDS = 3600.0
"""Timeout for one checkpoint: the service reads every byte from the disk before it responds."""

_ON_REQUEST = "; while the job trains, `ratchet checkpoint {job}` saves one"

_ID = typer.Argument(
    metavar="CHECKPOINT", help="Checkpoint id, as `checkpoints ls` shows it.", autocompletion=completion.checkpoints
)
CheckpointId = Annotated[str, _ID]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True)
    group.command("ls")(list_checkpoints)
    for command in (show, verify, export, pin, unpin, prune):
        group.command()(command)
    help_text = "List a job's checkpoints; show, verify, export, pin or unpin one; prune abandoned branches."
    app.add_typer(group, name="checkpoints", help=help_text, rich_help_panel=SAVED)


def list_checkpoints(ctx: typer.Context, job: ReadJobId, as_json: JsonFlag = False) -> None:
    """List the stored checkpoints of a job, newest step first."""
    with open_client(ctx) as client:
        found = list(client.checkpoints(job))
        none = absence_message(client.view(job), "no checkpoint", _ON_REQUEST.format(job=job)) if not found else ""
    if as_json:
        output.emit(found)
        return
    output.table(
        [
            "ID", "STEP", "ATTEMPT", "STATE", "REASON", "HOOK ITER", "SIZE", "PAUSE", "SAVE TIME", "METRIC", "VERIFIED", "FLAGS",
            "AGE", "DIGEST",
        ],
        [_row(c) for c in found],
        right=["STEP", "ATTEMPT", "HOOK ITER", "SIZE", "PAUSE", "SAVE TIME", "METRIC", "AGE"],
        drop=["DIGEST", "REASON", "PAUSE", "SAVE TIME", "STEP", "ATTEMPT", "AGE", "HOOK ITER", "SIZE", "VERIFIED", "METRIC",
              "FLAGS"],
        empty=none,
    )  # fmt: skip


def _row(c: views.CheckpointView) -> list[str]:
    """Return the table's cells for one checkpoint; "-" for what is unknown."""
    return [
        c.id, str(c.step), str(c.attempt), c.state, c.reason, output.dash(c.hook_iteration), output.size(c.size),
        _seconds(c.stall), _seconds(c.seconds), "-" if c.metric is None else f"{c.metric:.4g}",
        output.dash(c.verification), ",".join(_flags(c)) or "-", output.age(c.created_at), c.digest[:16],
    ]  # fmt: skip


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}s"


def _flags(c: views.CheckpointView) -> list[str]:
    """Return the words that apply to the checkpoint: final, pinned, adopted, abandoned, copied."""
    marks = {"final": c.finished, "pinned": c.pinned, "adopted": c.adopted, "abandoned": c.lineage == "abandoned"}
    marks["copied"] = c.uploaded_at is not None
    return [word for word, there in marks.items() if there]


def show(ctx: typer.Context, job: JobId, checkpoint: CheckpointId, as_json: JsonFlag = False) -> None:
    """Show one checkpoint with its manifest."""
    with open_client(ctx) as client:
        found = client.checkpoint(job, checkpoint)
    if as_json:
        output.emit(found)
        return
    manifest = found.manifest
    output.fields(
        [
            ("id", found.id), ("step", found.step), ("attempt", found.attempt), ("state", found.state),
            ("reason", found.reason), ("marks", ", ".join(_flags(found))), ("hook iteration", found.hook_iteration),
            ("parent step", found.parent.step if found.parent else None), ("size", output.size(found.size)),
            ("files", found.files), ("digest", found.digest), ("verification", found.verification),
            ("verified", output.format_time(found.verified_at)), ("damage", found.verification_error),
            ("training stood", None if found.stall is None else f"{found.stall:.3g} s"),
            ("save took", None if found.seconds is None else f"{found.seconds:.3g} s"), ("metric", found.metric),
            ("created", output.format_time(found.created_at)),
        ]
    )  # fmt: skip
    if manifest is None:
        output.note("its manifest cannot be read any more")
    else:
        output.line(json.dumps(manifest, indent=2, ensure_ascii=False))


def verify(
    ctx: typer.Context,
    job: JobOrPath,
    checkpoint: Annotated[str | None, _ID] = None,
    as_json: JsonFlag = False,
) -> None:
    """Read every byte of a checkpoint, or of all committed ones, and compare it with its digests. Exit code 1 if any is damaged.

    PATH: a checkpoint's directory on this machine, or a directory that contains checkpoints. With a PATH no service is used, and
    nothing is written or moved.
    """
    if is_path(job):
        paths = [job] if checkpoint is None else [job, checkpoint]
        exec_module("ratchet_store.verify", "xxhash", "worker", [*(["--json"] if as_json else []), "--", *paths])
    with open_client(ctx, timeout=_VERIFY_SECONDS) as client:
        if checkpoint is not None:
            results = [client.verify(job, checkpoint)]
            _print_result(results[0], as_json)
        else:
            results = list(_verify_all(client, job, as_json))
    if as_json:
        output.emit(results if checkpoint is None else results[0])
    damaged = [result for result in results if result.verification == "damaged"]
    if damaged:
        aside = sum(result.state == "quarantined" for result in damaged)
        text = f", {aside} of them set aside" if aside else ""
        output.note(
            f"{len(damaged)} of {len(results)} damaged{text}. A resume falls back to the newest good one by itself"
        )
        raise typer.Exit(Exit.JOB_FAILED)


def _verify_all(client: RatchetClient, job: str, as_json: bool) -> Iterator[views.VerifyResult]:
    """Verify the job's committed checkpoints one after the other, and yield the results. Each result is printed; with ``as_json``
    only damage is printed. Checkpoints that are deleted meanwhile are skipped."""
    from ratchet_contract.errors import Conflict, NotFound

    wanted = [c for c in client.checkpoints(job) if c.state == "committed"]
    if not wanted:
        output.note(absence_message(client.view(job), "no committed checkpoint to verify", _ON_REQUEST.format(job=job)))
    with output.progress(sum(c.size for c in wanted), pluralize(len(wanted), "checkpoint")) as advance:
        for view in wanted:
            try:
                result = client.verify(job, view.id)
            except (NotFound, Conflict) as error:  # deleted meanwhile, as older ones are while the job trains
                if isinstance(error, Conflict) and error.code != "checkpoint-gone":
                    raise
                output.note(f"{view.id}: {error.detail}")
            else:
                _print_result(result, as_json)
                yield result
            advance(view.size)


def _print_result(result: views.VerifyResult, as_json: bool) -> None:
    """Print the result of a verification, unless ``as_json``. Damage is printed on standard error in both cases."""
    if not as_json:
        output.line(
            f"{result.id}: {result.verification} ({pluralize(result.bytes_checked, 'byte')} in {result.seconds:.2f} s)"
        )
        output.flush()
    if result.verification == "damaged":
        output.note(f"{result.id} is damaged: {result.error}")


def export(
    ctx: typer.Context,
    job: JobId,
    output_path: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="File or directory to write; it must not exist yet.")
    ],
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="CHECKPOINT", help="Checkpoint id. (default: the newest)")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Export the checkpoint of this step instead.")
    ] = None,
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors: a file, the model alone; torch: a directory, all state, a file per rank; dcp: a directory for "
            "torch.distributed.checkpoint, model and optimizer.",
        ),
    ] = "safetensors",
) -> None:
    """Write a checkpoint as files for other programs; all bytes read are verified first."""
    if checkpoint is not None and step is not None:
        raise typer.BadParameter("give --checkpoint or --step, not both")
    with interruptible(), open_client(ctx) as client:
        found = checkpoint if checkpoint is not None else _find_committed(client, job, step)
        notes = client.export(job, found, output_path, format=form)
    for text in notes:
        output.note(f"note: {text}")
    output.line(str(output_path))
    output.note(f"{found} of {job} as {form}")


def _find_committed(client: RatchetClient, job: str, step: int | None) -> str:
    """Return the id of the committed checkpoint of ``step`` (None: the newest). Raise ``NotFound`` if there is none,
    ``typer.BadParameter`` if ``step`` has several."""
    from ratchet_contract.errors import NotFound

    view = client.view(job)
    newest = view.last_checkpoint if step is None else None
    if newest is not None:
        return newest
    found = [c.id for c in client.checkpoints(job) if c.state == "committed" and c.step == step]
    if len(found) > 1:
        raise typer.BadParameter(f"{len(found)} attempts saved step {step}: give --checkpoint {' or '.join(found)}")
    if not found:
        what = absence_message(view, "has no checkpoint") if step is None else f"has no checkpoint of step {step}"
        raise NotFound(
            f"job {job} {what}; `ratchet checkpoints ls {job}` lists its checkpoints", code="checkpoint-not-found"
        )
    return found[0]


def pin(ctx: typer.Context, job: JobId, checkpoint: CheckpointId, as_json: JsonFlag = False) -> None:
    """Keep a checkpoint until it is unpinned; retention does not remove it."""
    _set_pin(ctx, job, checkpoint, True, as_json)


def unpin(ctx: typer.Context, job: JobId, checkpoint: CheckpointId, as_json: JsonFlag = False) -> None:
    """Make a pinned checkpoint subject to retention again."""
    _set_pin(ctx, job, checkpoint, False, as_json)


def _set_pin(ctx: typer.Context, job: str, checkpoint: str, pinned: bool, as_json: bool) -> None:
    """Pin the checkpoint, or unpin it if ``pinned`` is False, and print the result."""
    with open_client(ctx) as client:
        view = client.pin(job, checkpoint, pinned=pinned)
    if as_json:
        output.emit(view)
    else:
        output.line(f"{view.id}: {'pinned' if view.pinned else 'not pinned'}")


def prune(
    ctx: typer.Context,
    job: JobId,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Also remove damaged checkpoints that were set aside.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove checkpoints that no attempt will start from, such as those of branches that `resume --from-step` abandoned. Pinned
    ones stay, unless they are damaged and set aside."""
    with open_client(ctx) as client:
        found = client.prune(job, dry_run=dry_run, quarantined=quarantined)
    if as_json:
        output.emit(found)
        return
    for name in [*found.checkpoints, *found.quarantined]:
        output.line(name)
    count = len(found.checkpoints) + len(found.quarantined)
    output.note(f"{count} {'would be removed' if dry_run else 'removed'}, {output.size(found.size)}")
