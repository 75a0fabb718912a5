"""``ratchet submit``: creates a job from a spec file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import RUN, JsonFlag, UploadOption, open_client, parse_pairs

if TYPE_CHECKING:
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api.views import JobView, Warning_

_COPY_SECONDS = 3600.0
"""Timeout for a submission that copies a model or a checkpoint."""


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=RUN)(submit)


def submit(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Job spec, YAML or JSON; - reads standard input.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show what would run; store nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Watch until the job has ended; Ctrl-C detaches.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Replace the spec's name.")] = None,
    sets: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the spec, like hook.name=powerSGD.")
    ] = [],  # noqa: B006  (typer copies it)
    labels: Annotated[list[str], typer.Option("--label", metavar="KEY=VALUE", help="Add a label.")] = [],  # noqa: B006
    start: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE", help="Start from this model: safetensors, or a PyTorch checkpoint."),
    ] = None,
    adopt: Annotated[
        Path | None,
        typer.Option(
            "--adopt",
            metavar="DIR",
            help="Continue from the newest checkpoint in DIR, the directory of a run without a service.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key", help="Submitting the same spec with the same key again returns the same job."
        ),
    ] = None,
    upload: UploadOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job, and print its id on standard output: id=$(ratchet submit spec.yaml)."""
    from ratchet_client.cli.commands import wait as wait_command
    from ratchet_client.resources.spec_file import read_spec

    if dry_run and (wait or follow or key is not None):
        raise typer.BadParameter("--dry-run stores nothing: leave out --wait, --follow and --idempotency-key")
    spec = read_spec(file)
    apply_overrides(
        spec, [*sets, *([f"name={json.dumps(name)}"] if name is not None else [])], parse_pairs(labels, "--label")
    )
    if start is not None:
        given = spec.get("start_from")
        spec["start_from"] = {**(given if isinstance(given, dict) else {}), "path": str(start.expanduser().absolute())}
    if adopt is not None:
        adopt = adopt.expanduser().absolute()
    with open_client(ctx, timeout=_COPY_SECONDS if spec.get("start_from") or adopt else 30.0) as client:
        if dry_run:
            _dry_run(client, spec, adopt, upload, as_json)
            return
        job = client.submit(spec, adopt=adopt, idempotency_key=key, upload=upload, note=output.note).view
        print_warnings(job.warnings)
        if not as_json:
            output.line(job.id)
            output.note(f"submitted {job.name} ({job.hook}); {job.phase}")
            note_adoption(job)
            _warn_duplicate_name(client, job)
        elif not (wait or follow):
            output.emit(job)
        if follow:
            wait_command.follow(ctx, job.id, as_json=as_json)
        elif wait:
            wait_command.wait(ctx, job.id, as_json=as_json)
        elif not as_json:
            output.note(f"watch it with: ratchet wait {job.id} --follow")
            output.note(f"files written to its current directory stay with the job: ratchet files {job.id}")


def _warn_duplicate_name(client: RatchetClient, job: JobView) -> None:
    """Print a note if another job has the same name, since the name may then not select ``job``."""
    from ratchet_contract.errors import RatchetError

    with suppress(RatchetError):
        others = client.jobs(name=job.name, page_size=2)
        if other := next((one for one in others if one.id != job.id), None):
            output.note(
                f"{other.id} ({other.phase}) has the name {job.name}, too: refer to this job by its id, or submit it with --name"
            )


def note_adoption(job: JobView) -> None:
    """Print the step at which ``job`` continues, if it has adopted a run without a service; else nothing."""
    if job.adopted_from is not None:
        output.note(f"continues from step {job.progress.step} of {job.adopted_from}, which is not modified")


def print_warnings(warnings: Sequence[Warning_]) -> None:
    """Print the service's warnings about a spec on standard error."""
    for warning in warnings:
        output.note(output.wrap_text(f"warning: {warning.pointer or '/'}: {warning.detail} [{warning.code}]"))


def apply_overrides(spec: dict[str, Any], sets: list[str], labels: dict[str, str]) -> None:
    """Change ``spec`` in place: set the keys of ``sets``, and add ``labels`` to its labels. ``sets``: items ``a.b=value`` with
    YAML values. Nothing is added to labels of a wrong type. Raise ``typer.BadParameter`` or ``SpecError`` for an item that cannot
    be applied."""
    from ratchet_client.resources.spec_file import json_value
    from ratchet_contract.spec.parse import load_spec_text

    for dotted, text in parse_pairs(sets, "--set").items():
        *outer, last = dotted.split(".")
        place = spec
        for part in outer:
            inner = place.get(part)
            if part == "hook" and isinstance(inner, str):
                inner = {"name": inner}
            if not isinstance(inner, dict | None):
                raise typer.BadParameter(f"--set {dotted}: {part} is not a mapping in this spec")
            place[part] = inner = {} if inner is None else inner
            place = inner
        place[last] = json_value(load_spec_text(text, dotted), f"--set {dotted}")
    if labels and isinstance(spec.get("labels"), dict | None):  # anything else is refused with the spec
        spec["labels"] = {**(spec.get("labels") or {}), **labels}


def _dry_run(
    client: RatchetClient, spec: dict[str, Any], adopt: Path | None, upload: bool | None, as_json: bool
) -> None:
    """Have the service check the spec, and print what would run. Raise ``SpecError`` for an invalid spec; with ``as_json`` its
    errors are printed first."""
    from ratchet_contract.errors import SpecError

    try:
        plan = client.plan(spec, adopt=adopt, upload=upload, note=output.note)
    except SpecError as error:
        if as_json:
            errors = [wrong.model_dump() for wrong in error.errors]
            output.emit({"code": error.code, "detail": error.detail, "errors": errors})
        raise
    _show_plan(plan, as_json)


def _show_plan(plan: Any, as_json: bool) -> None:
    """Print the plan, a ``PlanView``: as JSON, which contains its warnings, or as text, with the warnings on standard error."""
    if as_json:
        output.emit(plan)
        return
    wanted = (plan.spec.get("environment") or {}).get("requirements")
    output.line("the spec is valid; nothing was stored. It would run:")
    output.fields(
        [("device", plan.resolved.device), ("backend", plan.resolved.backend),
         ("threads per rank", plan.resolved.threads_per_rank), ("python", plan.resolved.python),
         ("requirements", ", ".join(wanted) if isinstance(wanted, list) else wanted),
         ("code digest", plan.resolved.code_digest),
         ("hook memory per rank", output.size(plan.hook_memory_bytes))]
    )  # fmt: skip
    for name, asked in (plan.launch.get("request") or {}).items():
        output.line(f"\n# what the engine is asked for: {name}")
        output.line(render_request(asked))
    print_warnings(plan.warnings)
    output.note("the whole launch: --json")


def render_request(request: Any) -> str:
    """Return a part of a launcher's request as text: a string without its final line ends, other values as YAML documents."""
    import yaml

    if isinstance(request, str):
        return request.rstrip("\n")
    several = isinstance(request, list) and all(isinstance(item, dict) for item in request)
    documents = request if several else [request]
    text = [yaml.safe_dump(item, sort_keys=False, allow_unicode=True, width=10_000).rstrip("\n") for item in documents]
    return "\n---\n".join(text)
