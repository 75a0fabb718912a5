"""``ratchet init``: from ``torchrun --nproc-per-node 4 train.py --lr 0.1`` to a spec."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import RUN, UNMANAGED, open_client
from ratchet_client.cli.exits import Exit
from ratchet_contract.errors import Refused

if TYPE_CHECKING:
    from ratchet_client.init.advice import Note
    from ratchet_client.init.command import Command
    from ratchet_client.init.proposal import Proposal


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
            help="What you train with today: `torchrun --nproc-per-node 4 train.py --lr 0.1`, `python train.py`, or the script.",
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
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    to_stdout: Annotated[bool, typer.Option("--print", help="Write the spec to standard output, and no file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found and the spec as JSON.")] = False,
    patch: Annotated[
        bool,
        typer.Option(
            "--patch",
            help="Print the change that the script needs to go on bit for bit, as a unified diff, and change nothing. Without "
            "another option.",
        ),
    ] = False,
) -> None:
    """Make a spec of the command that you train with. The script is read, never run; options of this command come first.

    Every option of torchrun is honoured, named as not needed, or refused with what to do instead.
    """
    if patch:
        if any((file, code, name, sets, force, to_stdout, as_json)):
            raise Refused("--patch prints the change of a script alone: leave the other options out")
        _patch(words)
        return
    from ratchet_client.cli.submit import override
    from ratchet_client.init import spec_yaml
    from ratchet_client.init.proposal import propose

    given: dict[str, Any] = {}
    override(given, sets, {})
    made = propose(words, os.environ, given, code=code, name=name)
    override(made.spec, sets, {})
    for key in ("code", "python"):  # as the proposal has them
        made.spec.pop(key, None)
    if "include" in given.get("code", {}):
        made.spec["code"] = {"include": given["code"]["include"]}
    target = file or Path(f"{made.place.script.stem}.yaml")
    if not to_stdout and target.exists() and not force:
        raise Refused(
            f"{target} is there already: --force writes over it, --output names another, --print shows the spec"
        )
    text = spec_yaml.render(
        made.spec, made.notes, made.facts, made.place, made.way, command=made.command, typed=_typed(words), file=str(target),
        python=made.python, base=Path.cwd() if to_stdout else target.absolute().parent.resolve(),
    )  # fmt: skip
    if not to_stdout:
        target.write_text(text, encoding="utf-8")
    if as_json:
        output.line(_document(made, None if to_stdout else target))
    elif to_stdout:
        output.line(text.rstrip("\n"))
    _tell(made.notes, made.command)
    if not to_stdout:
        _next(ctx, target, exact=made.way != "unmanaged")


def _patch(words: list[str]) -> None:
    """Print the difference; on standard error what is left to the user, a line for each place."""
    from ratchet_client.init import project
    from ratchet_client.init.advice import training_place
    from ratchet_client.init.command import parse_command
    from ratchet_client.init.patch import left_in_patched, patch_of
    from ratchet_client.init.reading import read_script
    from ratchet_contract.scripts import is_unmanaged

    place = project.locate(parse_command(words, os.environ).script, None)
    name = os.path.relpath(place.script)
    if name.startswith(".."):
        raise Refused(f"patch takes no path from above: cd {shlex.quote(str(place.code))} first")
    if not is_unmanaged(place.script.read_bytes()):
        output.note(f"{name} uses Ratchet already: nothing is to be changed")
        for remark in left_in_patched(place.script):
            output.note(f"{name}, line {remark.line}: {remark.text}")
        return
    made = patch_of(place.script, name)
    sys.stdout.buffer.write(made.diff.encode(made.encoding))
    for remark in made.remarks:
        then = made.moved.get(remark.line, remark.line)
        moved = f" (line {then} of the changed file)" if then != remark.line else ""
        output.note(f"{name}, line {remark.line}: {remark.text}{moved}")
    if made.whole:
        command = shlex.join(words) if made.starts_ranks else _with_ranks(words)
        spec = shlex.quote(f"{place.script.stem}.yaml")
        output.note(f"next: ratchet init --patch {shlex.quote(name)} | patch -p0, then: ratchet init {command}, then: "
                    f"ratchet prove {spec}, then: ratchet run {command}")  # fmt: skip
    elif made.remarks:
        output.note("these places are left to you (docs/adoption.md)")
    else:
        there = training_place(read_script(place.script, place.code))
        where = f"; {there} has it: ratchet init --patch {os.path.relpath(place.code / there.file)}" if there else ""
        output.note(f"{name}: no Trainer of Lightning or transformers, Accelerator or DistributedDataParallel is here{where} "
                    "(docs/adoption.md has the change for other scripts)")  # fmt: skip
    if not made.whole:
        raise typer.Exit(Exit.REFUSED)


def _typed(words: list[str]) -> str:
    """The command as one line; the bare forms are torchrun's."""
    first = Path(words[0]).name
    whole = (
        words if first.startswith(("python", "torchrun")) or "=" in words[0] or first == "env" else ["torchrun", *words]
    )
    return shlex.join(word for i, word in enumerate(whole) if not (word == "--" and i == 2 and whole is not words))


def _with_ranks(words: list[str]) -> str:
    """The command as one line, with the option for ranks where it is the script alone."""
    bare = not words[0].startswith("-") and Path(words[0]).suffix == ".py"
    return shlex.join(["torchrun", "--nproc-per-node", "2", *words] if bare else words)


def _document(made: Proposal, target: Path | None) -> str:
    import json
    from dataclasses import asdict

    document = {
        "file": None if target is None else str(target.absolute()),
        "spec": made.whole_spec(),
        "found": [asdict(note) for note in made.notes],
        "dropped": made.command.dropped,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _tell(notes: list[Note], found: Command) -> None:
    for note in notes:
        output.note(f"{'warning' if note.serious else 'found'}: {note.text}")
    for option, why in found.dropped.items():
        output.note(f"not needed: {option}: {why}")


def _next(ctx: typer.Context, target: Path, *, exact: bool) -> None:
    """What a running service says of the spec, and the command to type next. ``exact``: there is something to prove."""
    from ratchet_client.cli.submit import print_warnings
    from ratchet_client.errors import ServiceUnreachable
    from ratchet_client.spec_file import read_spec
    from ratchet_contract.errors import RatchetError

    output.note(f"wrote {target}")
    submit = f"ratchet submit {shlex.quote(str(target))} --follow"
    try:
        with open_client(ctx, retry_for=0) as client:
            plan = client.plan(read_spec(str(target)))
    except ServiceUnreachable:
        prove = f"ratchet prove {shlex.quote(str(target))}, then: " if exact else ""
        output.note(f"next: {prove}ratchet run {shlex.quote(str(target))}")
        output.note(f"or, with a service: ratchet serve (in a terminal of its own), then: {submit}")
    except RatchetError as error:
        output.note(f"the service would refuse it: {error.detail}\nnext: mend {target}, then: {submit}")
    else:
        print_warnings([warning for warning in plan.warnings if warning.code != UNMANAGED])  # said above
        output.note(f"next: {submit}")
