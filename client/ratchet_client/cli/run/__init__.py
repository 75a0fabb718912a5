"""``ratchet run``: trains a script to its end by one command, with a private service if none runs."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.exit_codes import Exit
from ratchet_client.cli.shared.options import PATIENCE, RUN, Settings, reason_text, settings, steps
from ratchet_client.cli.shared.signals import interruptible, signals_ignored
from ratchet_contract.plural import join_first, pluralize, short_digests

if TYPE_CHECKING:
    from collections.abc import Collection

    from ratchet_client.cli.commands.logs import EventFold
    from ratchet_client.cli.run.beginning import SelectedJob
    from ratchet_client.cli.run.private_service import RunService
    from ratchet_client.init.proposal import Proposal
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api.views import JobView

_SPECS = (".yaml", ".yml", ".json")


def register(app: typer.Typer) -> None:
    app.command(
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        rich_help_panel=RUN,
    )(run)


def run(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[torchrun] [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS] | SPEC",
            show_default=False,
            help="The script, `torchrun --nproc-per-node 4 train.py --lr 0.1` as `ratchet init` takes it, or a spec file.",
        ),
    ],
    nproc: Annotated[
        str | None,
        typer.Option("--nproc", metavar="N", help="Ranks, as torchrun's --nproc-per-node; also gpu, cpu, auto."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job. (default: the script's)")] = None,
    sets: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the spec, like hook.name=powerSGD.")
    ] = [],  # noqa: B006  (typer copies it)
    new: Annotated[
        bool,
        typer.Option(
            "--new", help="Start a new job even if this command has an unfinished one, which is then cancelled."
        ),
    ] = False,
    adopt: Annotated[
        Path | None,
        typer.Option(
            "--adopt",
            metavar="DIR",
            help="Start a new job from the newest checkpoint of a run without a service, which saved to DIR.",
        ),
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            metavar="N,...|all", help="Ranks whose output is shown; if several, each line begins with the rank."
        ),
    ] = "0",
    outputs: Annotated[
        Path | None,
        typer.Option(
            "--outputs",
            "-o",
            metavar="DIR",
            help="When the job has succeeded, copy into DIR the files it wrote, replacing files of the same names.",
        ),
    ] = None,
) -> None:
    """Train a script to its end; ranks that are killed start again from their checkpoint. Options of this command come first.

    Standard output is rank 0's; all else goes to standard error. Ctrl-C or SIGTERM saves a checkpoint and stops; the same
    command continues from there.
    """
    from ratchet_client.cli.commands.logs import EventFold
    from ratchet_client.cli.run.beginning import begin, is_resumable
    from ratchet_client.cli.run.private_service import COMMAND_FILE, run_service, unfinished_elsewhere
    from ratchet_client.http.discovery import home_directory
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.spec.parse import parse_spec

    if settings(ctx).server is not None:
        raise typer.BadParameter(
            "--server: run trains on this machine; `ratchet submit FILE --follow` uses a service on another machine"
        )
    spec, mark, proof = _spec(words, nproc, name, sets)
    shown = _ranks(ranks, parse_spec(spec).world.size)
    if outputs is not None:
        _check_outputs(outputs)
    _warn_slurm_nodes()
    place = f"{spec['name']}-{mark[:8]}"
    base = home_directory(settings(ctx).home)
    with interruptible(), run_service(base, place) as service:
        ctx.obj = Settings(None, service.paths.home)
        with RatchetClient(home=service.paths.home, retry_for=PATIENCE, timeout=600.0) as client:
            begun = begin(client, service.paths, spec, mark, new=new, adopt=adopt)
            if service.private:
                for command in unfinished_elsewhere(service.paths, spec["name"]):
                    output.note(f"unfinished, of another command: {command}")
                (service.paths.home / COMMAND_FILE).write_text(_typed(), encoding="utf-8")
            fold = EventFold()
            job = _train(ctx, client, service, begun, shown, fold)
            if service.private and not is_resumable(job):
                (service.paths.home / COMMAND_FILE).unlink(missing_ok=True)
            # Without --home, ``prove`` might use a service that runs for another directory, with another interpreter.
            home = ["--home", _short_path(base)] if service.private else []
            proved = proof.prepare + shlex.join(["ratchet", *home, "prove", *proof.target])
            code = _print_results(client, service, job, outputs, proved, fold.dedupe_errors(reason_text(job)))
            if code is Exit.JOB_FAILED and (misplaced := _own_options(ctx, words)):
                output.note(
                    f"{', '.join(misplaced)}: an option after the script is the script's; options of `ratchet run` come "
                    "before it"
                )
    raise typer.Exit(code)


class _Proof(NamedTuple):
    """The two parts of the command line that proves this job. ``prepare``: a command that pipes the spec to ``ratchet prove``, or
    ""; ``target``: arguments of ``ratchet prove``."""

    prepare: str
    target: list[str]


def _spec(words: list[str], nproc: str | None, name: str | None, sets: list[str]) -> tuple[dict[str, Any], str, _Proof]:
    """Return the spec for the command, a digest that identifies the command, and the command that proves the job. Raise
    ``typer.BadParameter``, ``Refused``, ``SpecError`` or ``NotFound`` for an unusable command."""
    from ratchet_client.cli.commands.submit import apply_overrides
    from ratchet_client.cli.run.beginning import command_digest
    from ratchet_client.init.command_line import count_ranks, parse_command
    from ratchet_client.init.proposal import propose
    from ratchet_client.resources.spec_file import read_spec
    from ratchet_contract.spec.parse import parse_spec

    given: dict[str, Any] = {}
    apply_overrides(given, sets, {})
    made: Proposal | None = None
    if words[0].endswith(_SPECS):
        if len(words) > 1:
            raise typer.BadParameter(
                f"a spec contains the script's arguments: leave out {shlex.join(words[1:])}, or use --set"
            )
        spec = read_spec(words[0])
    else:
        made = propose(words, os.environ, given, code=None, name=name)
        spec = made.full_spec()
        for note in made.notes:
            if note.serious:
                output.note(f"warning: {note.text}")
    if nproc is not None:
        count, device = count_ranks(nproc)
        apply_overrides(
            spec, [f"world.ranks_per_node={count}", *([] if device == "auto" else [f"world.device={device}"])], {}
        )
    apply_overrides(spec, sets, {})
    if made is not None:  # the proposal has determined the paths of code and interpreter
        spec["code"]["path"] = str(made.place.code)
        spec |= {} if made.python is None else {"python": str(made.python)}
    if name is not None:
        spec["name"] = name
    world = parse_spec(spec).world  # before a directory is named after the spec, and a service started
    changed = [] if nproc is None else [f"world.ranks_per_node={world.ranks_per_node}"]
    changed += [] if nproc is None or device == "auto" else [f"world.device={device}"]
    changed += sets
    options = [part for one in changed for part in ("--set", one)]
    if made is None:
        return spec, command_digest(spec), _Proof("", [*options, words[0]])
    proof = _Proof(f"{shlex.join(['ratchet', 'init', '--print', *options, *words])} | ", ["-"])
    # Unlike ``made.command``, without what a Lightning Trainer in the script sets.
    typed, script = parse_command(words, os.environ), {"script": str(made.place.script), "python": spec.get("python")}
    words_ = {"arguments": typed.arguments, "env": typed.env, "ranks": typed.given}
    said = {"policy": typed.policy, "nproc": nproc, "name": spec["name"], "set": given}
    return spec, command_digest({**script, **words_, **said}), proof


def _own_options(ctx: typer.Context, words: list[str]) -> list[str]:
    """Return those of ``words`` that look like options of ``ratchet run``. They have no effect on ``ratchet run``, since they are
    part of the training command."""
    own = {option for parameter in ctx.command.params for option in parameter.opts}
    return [word for word in words if word.startswith("--") and word.partition("=")[0] in own]


def _ranks(text: str, size: int) -> Collection[int] | None:
    """Return the ranks that ``text``, the value of ``--ranks``, selects; None: all. Raise ``typer.BadParameter`` if it is invalid
    for ``size`` ranks."""
    if text == "all":
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise typer.BadParameter(f"--ranks takes numbers with commas between them, or all, not {text!r}")
    found = {int(part) for part in parts}
    if max(found) >= size:
        raise typer.BadParameter(f"--ranks {text}: the job has {pluralize(size, 'rank')}, numbered from 0")
    return found


def _check_outputs(folder: Path) -> None:
    """Raise ``Refused`` if files could not be copied into ``folder``, for example because it cannot be created."""
    from ratchet_contract.errors import Refused

    place = folder if os.path.lexists(folder) else folder.absolute().parent
    if not place.is_dir():
        wrong = "is not a directory" if os.path.lexists(place) else "does not exist: create it first"
    elif not os.access(place, os.W_OK | os.X_OK):
        wrong = "cannot be written to"
    else:
        return
    raise Refused(f"--outputs {folder}: {place} {wrong}. Nothing was started")


def _typed() -> str:
    """Return ``ratchet`` and this process's arguments, quoted for a shell."""
    return shlex.join(["ratchet", *sys.argv[1:]])


def _warn_slurm_nodes() -> None:
    """Print a warning if this process runs in a Slurm allocation of several nodes."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1":
        output.note(
            f"warning: this allocation has {nodes} nodes, and `ratchet run` trains on this one alone; the Slurm launcher takes "
            "several (docs/cluster.md)"
        )


def _train(
    ctx: typer.Context,
    client: RatchetClient,
    service: RunService,
    begun: SelectedJob,
    ranks: Collection[int] | None,
    fold: EventFold,
) -> JobView:
    """Follow the job until it has ended or is suspended, and return it. Ctrl-C suspends the job; a second one kills
    a private service with its ranks, and raises ``typer.Exit``. ``ranks``: whose output is shown, None: all."""
    from ratchet_client.cli.commands.wait import pump
    from ratchet_client.cli.run.rank_output import RankOutput
    from ratchet_client.cli.run.view import RunView
    from ratchet_contract.errors import Conflict
    from ratchet_contract.phases import JobPhase

    job_id, until = begun.job.id, (JobPhase.SUSPENDED,)
    paths = service.paths.job(job_id)

    def suspend() -> None:
        """Request that the job is suspended; nothing happens if it has ended or is being cancelled."""
        with suppress(Conflict):  # the job has ended meanwhile, or is being cancelled
            client.suspend(job_id)

    with RankOutput(paths, ranks, begun.attempt) as shown:
        view = RunView(paths, ranks, partial(_report, service, job_id), service.restart_if_ended, shown.note)
        try:
            return pump(ctx, job_id, view, fold, after=begun.event, until=until, on_interrupt=suspend)
        except KeyboardInterrupt as error:
            twice = isinstance(
                error.__context__, KeyboardInterrupt
            )  # a second one, while the remaining events were shown
        try:
            if twice:
                raise KeyboardInterrupt
            suspend()  # the signal may have arrived before ``pump`` handled it
            second = "ends it at once, without one" if service.private else "ends only this command"
            shown.note(f"stopping after a checkpoint; a second Ctrl-C {second}")
            return client.wait(job_id, until=until)
        except KeyboardInterrupt:
            if service.private:
                with signals_ignored():
                    service.kill()
                output.note("ended at once; the same command continues from the newest checkpoint, if there is one")
            else:
                suspend()  # the signal may have interrupted the first request
                output.note("its service stops the job after a checkpoint; the same command continues from there")
            raise typer.Exit(Exit.INTERRUPTED) from None


def _report(service: RunService, job_id: str, text: str) -> str:
    """Return the message ``text`` of the service, with its commands adapted if the service is private."""
    from ratchet_client.cli.run.view import private_commands

    return private_commands(text, job_id, shlex.quote(_short_path(service.paths.home))) if service.private else text


def _print_results(
    client: RatchetClient, service: RunService, job: JobView, outputs: Path | None, proof: str, reason: str
) -> Exit:
    """Print how the job ended or that it is suspended, where its results are and which commands come next; return the exit code.
    ``outputs``: a directory to copy a successful job's files to, replacing existing ones. ``proof``: the command that proves the
    job. Raise the errors of ``fetch_files``, after all else is printed."""
    from ratchet_client.cli.commands.files import escape_path, outputs_text
    from ratchet_client.cli.run.beginning import is_resumable

    paths = service.paths.job(job.id)
    told = f": {_report(service, job.id, reason)}" if reason else ""
    output.note(f"{job.id} {job.phase} at step {steps(job)}{told}")
    attempts = client.attempts(job.id)
    resumed = [
        f"attempt {one.number} {one.proof}" for one in attempts
        if one.resume_report is not None and one.resume_report.verdict not in ("fresh", "unmanaged")
    ]  # fmt: skip
    if resumed:
        output.note(f"resumes: {join_first(resumed)}")
    for attempt in attempts:
        report, redone = attempt.resume_report, attempt.redone.first_difference
        lost = report.sentence() if report is not None and report.verdict == "not-exact" else None
        if cause := lost if redone is None else redone.sentence():
            text = f"not exact: attempt {attempt.number} may have other bits than an undisturbed run. {short_digests(cause)}"
            output.note(text)
            break
    if job.phase == "SUSPENDED":
        at = "there" if job.last_checkpoint is not None else "its first line, since it has no checkpoint"
        output.note(f"the same command continues from {at}; --new starts another job")
        return Exit.INTERRUPTED
    if job.phase == "SUCCEEDED" and job.last_checkpoint is not None:
        output.note(f"model: {_short_path(paths.checkpoints / job.last_checkpoint)}")
    found = outputs_text(client, job)
    if found is not None:
        output.note(f"outputs: {found}, in {_short_path(paths.work_dir)}")
    home = shlex.quote(_short_path(service.paths.home))
    first = f"ratchet serve --home {home}, and in another terminal " if service.private else ""
    if job.phase != "SUCCEEDED":
        output.note(f"details: {first}ratchet --home {home} attempts {job.id}, or ratchet --home {home} logs {job.id}")
        if is_resumable(job):
            output.note("the same command continues from its newest checkpoint; --new starts another job")
        return Exit.JOB_FAILED
    more = [f"logs {job.id}"] if found is None else [f"cp {job.id}: DIR"]
    more += [] if job.last_checkpoint is None else [f"checkpoints export {job.id} -o model.safetensors"]
    output.note(f"details: {first}{', or '.join(f'ratchet --home {home} {command}' for command in more)}")
    if job.last_checkpoint is not None:
        output.note(f"does it end with the same bits when it is killed? {proof}")
    if outputs is not None:  # last, since it raises if the disk is full
        copied = client.fetch_files(job.id, outputs, force=True)
        for file in copied.files:
            output.note(f"copied: {escape_path(str(file))}")
        for text in copied.notes:
            output.note(f"note: {text}")
        if not copied.files:
            output.note(f"nothing was copied to {outputs}")
    return Exit.OK


def _short_path(path: Path) -> str:
    """Return ``path`` relative to the current directory. A path that is not below this directory is returned unchanged."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
