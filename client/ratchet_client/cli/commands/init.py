"""``ratchet init``: writes a spec for a command such as ``torchrun --nproc-per-node 4 train.py --lr 0.1``."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.exit_codes import Exit
from ratchet_client.cli.shared.options import RUN, UNMANAGED, open_client

if TYPE_CHECKING:
    from ratchet_client.init.advice import Note
    from ratchet_client.init.command_line import Command
    from ratchet_client.init.proposal import Proposal

_SPEC_REFUSALS: Final = (409, 413, 422)
"""Statuses with which a service refuses a spec or its code; others, such as 401, say nothing about the spec."""


def register(app: typer.Typer) -> None:
    app.command(
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        rich_help_panel=RUN,
    )(init)


def init(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[torchrun] [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]",
            show_default=False,
            help="Your training command: `torchrun --nproc-per-node 4 train.py --lr 0.1`, `python train.py`, or the script.",
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. (default: SCRIPT's name with .yaml, in this directory)"),
    ] = None,
    code: Annotated[Path | None, typer.Option(help="Directory to snapshot. (default: the script's)")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job. (default: the script's)")] = None,
    sets: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the spec, like hook.name=powerSGD.")
    ] = [],  # noqa: B006  (typer copies it)
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    to_stdout: Annotated[
        bool, typer.Option("--print", help="Write the spec to standard output instead of a file.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found and the spec as JSON.")] = False,
    patch: Annotated[
        bool,
        typer.Option(
            "--patch",
            help="Print the change that the script needs to resume bit for bit, as a unified diff; nothing is modified. Takes "
            "no other option.",
        ),
    ] = False,
) -> None:
    """Write a spec for an existing training command. The script is read, never run; options of this command come first.

    Every torchrun option is applied, reported as not needed, or refused with an alternative.
    """
    from ratchet_contract.errors import Refused

    if patch:
        if any((file, code, name, sets, force, to_stdout, as_json)):
            raise Refused("--patch takes only a script: leave out the other options")
        _patch(words)
        return
    from ratchet_client.cli.commands.submit import apply_overrides
    from ratchet_client.init import render_yaml
    from ratchet_client.init.proposal import propose

    given: dict[str, Any] = {}
    apply_overrides(given, sets, {})
    made = propose(words, os.environ, given, code=code, name=name)
    apply_overrides(made.spec, sets, {})
    for key in ("code", "python"):  # the proposal has applied them already (``place``, ``python``)
        made.spec.pop(key, None)
    if "include" in given.get("code", {}):
        made.spec["code"] = {"include": given["code"]["include"]}
    target = file or Path(f"{made.place.script.stem}.yaml")
    if not to_stdout and target.exists() and not force:
        raise Refused(
            f"{target} already exists: --force overwrites it, --output names another file, --print shows the spec"
        )
    text = render_yaml.render(
        made.spec, made.notes, made.facts, made.place, made.way, command=made.command, typed=_command_line(words),
        file=str(target),
        python=made.python, base=Path.cwd() if to_stdout else target.absolute().parent.resolve(),
    )  # fmt: skip
    if not to_stdout:
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise Refused(f"cannot write {target.name} in {target.absolute().parent}: {error.strerror}") from None
    if as_json:
        output.line(_document(made, None if to_stdout else target))
    elif to_stdout:
        output.line(text.rstrip("\n"))
    _print_notes(made.notes, made.command)
    if not to_stdout:
        _print_next_steps(ctx, target, exact=made.way != "unmanaged")


def _patch(words: list[str]) -> None:
    """Print the diff that patches the script, if there is one. Remarks and, for a complete diff, the next commands are printed on
    standard error. Raise ``typer.Exit`` if the script needs changes that the diff does not make, or if no place for a change is
    found. Raise ``Refused`` if the script is not below the current directory or not valid Python."""
    from ratchet_client.init import project
    from ratchet_client.init.advice import tracker_notes, training_place
    from ratchet_client.init.command_line import parse_command
    from ratchet_client.init.patch.diff import patch_of, remaining_remarks
    from ratchet_client.init.read_script import read_script
    from ratchet_contract.errors import Refused
    from ratchet_contract.script.unmanaged_script import is_unmanaged

    place = project.locate(parse_command(words, os.environ).script, None)
    name = os.path.relpath(place.script)
    if name.startswith(".."):
        raise Refused(f"patch takes no path from above: cd {shlex.quote(str(place.code))} first")
    facts = read_script(place.script, place.code)
    loggers = [note.text for note in tracker_notes(facts)]
    if not is_unmanaged(place.script.read_bytes()):
        remarks = remaining_remarks(place.script)
        output.note(f"{name} already uses Ratchet{'' if remarks or loggers else ': no change is needed'}")
        for remark in remarks:
            output.note(f"{name}, line {remark.line}: {remark.text}")
        for text in loggers:
            output.note(text)
        if any(remark.needed for remark in remarks):
            output.note("these places are left to you (docs/adoption.md)")
            raise typer.Exit(Exit.REFUSED)
        return
    made = patch_of(place.script, name)
    sys.stdout.buffer.write(made.diff.encode(made.encoding))
    for remark in made.remarks:
        then = made.moved.get(remark.line, remark.line)
        moved = f" (line {then} of the changed file)" if then != remark.line else ""
        output.note(f"{name}, line {remark.line}: {remark.text}{moved}")
    for text in loggers:
        output.note(text)
    if made.is_complete:
        command = shlex.join(words) if made.starts_ranks else _with_ranks(words)
        spec = shlex.quote(f"{place.script.stem}.yaml")
        output.note(f"next: ratchet init --patch {shlex.quote(name)} | patch -p0, then: ratchet init {command}, then: "
                    f"ratchet prove {spec}, then: ratchet run {command}")  # fmt: skip
    elif made.remarks:
        output.note("these places are left to you (docs/adoption.md)")
    else:
        there = training_place(facts)
        where = f"; {there} has it: ratchet init --patch {os.path.relpath(place.code / there.file)}" if there else ""
        output.note(f"{name}: found no Trainer of Lightning or transformers, Accelerator or DistributedDataParallel{where} "
                    "(docs/adoption.md has the change for other scripts)")  # fmt: skip
    if not made.is_complete:
        raise typer.Exit(Exit.REFUSED)


def _command_line(words: list[str]) -> str:
    """Return the command as one shell line, for the header of the spec. ``torchrun`` is prefixed unless the first word names
    torchrun, Python or ``env``, or contains ``=``."""
    first = Path(words[0]).name
    whole = (
        words if first.startswith(("python", "torchrun")) or "=" in words[0] or first == "env" else ["torchrun", *words]
    )
    return shlex.join(word for i, word in enumerate(whole) if not (word == "--" and i == 2 and whole is not words))


def _with_ranks(words: list[str]) -> str:
    """Return the command as one shell line. ``torchrun`` with 2 ranks is prefixed if the command begins with a Python script."""
    bare = not words[0].startswith("-") and Path(words[0]).suffix == ".py"
    return shlex.join(["torchrun", "--nproc-per-node", "2", *words] if bare else words)


def _document(proposal: Proposal, target: Path | None) -> str:
    """Return the JSON text for ``--json``. ``target``: the spec file that was written; None if no file was written."""
    import json
    from dataclasses import asdict

    document = {
        "file": None if target is None else str(target.absolute()),
        "spec": proposal.full_spec(),
        "found": [asdict(note) for note in proposal.notes],
        "dropped": proposal.command.dropped,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _print_notes(notes: list[Note], command: Command) -> None:
    """Print the notes, and the options that are not needed, on standard error."""
    for note in notes:
        output.note(f"{'warning' if note.serious else 'found'}: {note.text}")
    for option, why in command.dropped.items():
        output.note(f"not needed: {option}: {why}")


def _print_next_steps(ctx: typer.Context, target: Path, *, exact: bool) -> None:
    """Print the next commands, and what a running service says about the spec in ``target``. For this the service checks the
    spec, and the code may be uploaded to it. ``exact``: if no service runs, suggest ``ratchet prove`` too."""
    from ratchet_client.cli.commands.submit import print_warnings
    from ratchet_client.http.errors import ServiceUnreachable
    from ratchet_client.resources.spec_file import read_spec
    from ratchet_contract.errors import RatchetError, SpecError

    output.note(f"wrote {target}")
    submit = f"ratchet submit {shlex.quote(str(target))} --follow"
    try:
        with open_client(ctx, retry_for=0) as client:
            plan = client.plan(read_spec(str(target)))
    except ServiceUnreachable:
        prove = f"ratchet prove {shlex.quote(str(target))}, then: " if exact else ""
        output.note(f"next: {prove}ratchet run {shlex.quote(str(target))}")
        output.note(f"or, with a service: ratchet serve (in another terminal), then: {submit}")
    except RatchetError as error:
        if isinstance(error, SpecError) or error.extra.get("status") in _SPEC_REFUSALS:
            output.note(f"the service would refuse this spec: {error.detail}\nnext: correct {target}, then: {submit}")
        else:
            output.note(f"the service has not checked this spec: {error.detail}")
            output.note(f"next, when that is settled: {submit}")
    else:
        print_warnings([warning for warning in plan.warnings if warning.code != UNMANAGED])  # printed above
        output.note(f"next: {submit}")
