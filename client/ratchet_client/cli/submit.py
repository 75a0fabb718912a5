"""``ratchet submit``: from a spec file to a job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import JsonFlag, open_client, pairs


def register(app: typer.Typer) -> None:
    app.command()(submit)


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
    key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="The same key and spec give the same job, however often submitted."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job. Standard output gets the job's id and nothing else: id=$(ratchet submit spec.yaml)."""
    from ratchet_client.cli import watch

    spec = read_spec(file)
    override(spec, [*sets, *([f"name={json.dumps(name)}"] if name else [])], pairs(labels, "--label"))
    with open_client(ctx) as client:
        if dry_run:
            _show_plan(client.plan(spec), as_json)
            return
        job = client.submit(spec, idempotency_key=key)
        for warning in job.warnings:
            output.note(f"warning: {warning.pointer or '/'}: {warning.detail} [{warning.code}]")
        if not as_json:
            output.line(job.id)
            output.note(f"submitted {job.name} ({job.hook}); {job.phase}")
        elif not (wait or follow):
            output.emit(job)
        if follow:
            watch.follow(ctx, job.id, as_json=as_json)
        elif wait:
            watch.wait(ctx, job.id, as_json=as_json)
        elif not as_json:
            output.note(f"watch it with: ratchet wait {job.id} --follow")


def read_spec(file: str) -> dict[str, Any]:
    """The decoded spec, with relative paths made absolute from the file's directory. Raises ``SpecError``, ``NotFound``."""
    from ratchet_contract.errors import NotFound, SpecError
    from ratchet_contract.spec_parse import load_spec_text

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound(f"cannot read {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{file} is not UTF-8 text: a job spec is YAML or JSON") from None
    data = load_spec_text(text)
    if not isinstance(data, dict):
        raise SpecError(f"{file} holds no mapping: a job spec is a YAML mapping or a JSON object")
    data = _json_value(data, file)
    _absolute_paths(data, Path.cwd() if file == "-" else Path(file).absolute().parent)
    return dict(data)


def _json_value(data: Any, where: str) -> Any:
    """What YAML gave, as JSON knows it. Raises ``SpecError`` for dates, not-a-number and the like."""
    from ratchet_contract.errors import SpecError

    try:
        return json.loads(json.dumps(data, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{where} holds a value that JSON does not know ({error}): quote it") from None


def _absolute_paths(data: dict[str, Any], base: Path) -> None:
    """``code.path`` and a ``python`` given as a path mean the same wherever the service runs."""
    code = data.get("code")
    if isinstance(code, dict) and isinstance(code.get("path"), str) and code["path"]:
        code["path"] = str((base / Path(code["path"]).expanduser()).resolve())
    python = data.get("python")
    if isinstance(python, str) and "/" in python:
        # Not resolved: a virtual environment's python is a link that must stay one.
        data["python"] = str(base / Path(python).expanduser())


def override(spec: dict[str, Any], sets: list[str], labels: dict[str, str]) -> None:
    """Apply ``--set a.b=value`` (the value is YAML) and ``--label``, in place."""
    from ratchet_contract.spec_parse import load_spec_text

    for dotted, text in pairs(sets, "--set").items():
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
        place[last] = _json_value(load_spec_text(text), f"--set {dotted}")
    if labels:
        spec["labels"] = {**(spec.get("labels") or {}), **labels}


def _show_plan(plan: Any, as_json: bool) -> None:
    if as_json:
        output.emit(plan)
        return
    output.line("the spec is valid; nothing was stored. It would run:")
    output.fields(
        [("device", plan.resolved.device), ("backend", plan.resolved.backend),
         ("threads per rank", plan.resolved.threads_per_rank), ("python", plan.resolved.python),
         ("code digest", plan.resolved.code_digest)]
    )  # fmt: skip
    output.line(json.dumps(plan.launch, indent=2, ensure_ascii=False))
    for warning in plan.warnings:
        output.note(f"warning: {warning.pointer or '/'}: {warning.detail} [{warning.code}]")
