"""``ratchet prove``: checks that this code, on these devices, ends with the same bits when it is interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ratchet_client.cli.commands.compare import COMPARE_SECONDS, MAX_LINES
from ratchet_client.cli.commands.submit import apply_overrides
from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.exit_codes import Exit
from ratchet_client.cli.shared.options import RUN, JsonFlag, UploadOption, is_path, job_id_of, open_client, settings
from ratchet_contract.plural import join_first, pluralize

_UNPROVED: Final = {"not-exercised": "EQUAL, BUT NOT ALL WAS EXERCISED", "not-exact": "EQUAL, BUT NOT EXACT"}

if TYPE_CHECKING:
    from ratchet_client.cli.doctor.progress import Progress
    from ratchet_client.cli.prove.proof import Proof
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api.views import ComparisonView


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=RUN)(prove)


def prove(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|JOB", help="A spec file (with a slash or a dot in it, or -), or a job.", show_default=False
        ),
    ],
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Last step of the runs. (default: after the end of an epoch, an evaluation and the hook's start, at most 1000)",
            show_default=False,
        ),
    ] = None,
    sets: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the spec, like hook.start_powerSGD_iter=10."),
    ] = [],  # noqa: B006
    upload: UploadOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Prove on your own code, data and devices that an interrupted job ends with the same bits.

    SPEC: two short undisturbed runs, which must be equal, then one that is killed and preempted; every tensor, state and
    metric is compared. Needs a Session or a Task. If no service runs, starts a private one on this machine. Exit code 0:
    proved; 1: it differs; 3: equal, but a resume was not exact, or something in the spec was not exercised.

    JOB: a fork trains from its last checkpoint but one to the last, which must be equal. The job itself does not change, except
    that these two checkpoints are pinned meanwhile.
    """
    from ratchet_client.cli.doctor.progress import Progress
    from ratchet_client.cli.prove.proof import prove_job, prove_spec
    from ratchet_client.cli.prove.trials import TrialFailed, trials
    from ratchet_client.cli.shared.signals import interruptible
    from ratchet_client.resources.spec_file import read_spec
    from ratchet_contract.spec.parse import parse_spec

    try:
        if target == "-" or is_path(target):
            spec = read_spec(target)
            apply_overrides(spec, sets, {})
            parse_spec(spec)  # before a service is started
            with (
                interruptible(),
                Progress(lines=True) as say,
                _service(ctx, spec, say) as client,
                trials(client, say) as made,
            ):
                proof = prove_spec(made, spec, steps, upload)
            proof = proof.model_copy(update={"unseen": [*proof.unseen, *_objects_without_session(spec)]})
        else:
            if steps is not None or sets or upload is not None:
                raise typer.BadParameter(
                    "--steps, --set and --upload apply to a SPEC only; a JOB is retrained unchanged"
                )
            job_id = job_id_of(ctx, target)
            with (
                interruptible(),
                Progress(lines=True) as say,
                open_client(ctx, timeout=COMPARE_SECONDS) as client,
                trials(client, say) as made,
            ):
                proof = prove_job(made, job_id)
    except TrialFailed as error:
        output.note(f"ratchet: {error.detail}")
        raise typer.Exit(Exit.JOB_FAILED) from None
    if as_json:
        output.emit(proof)
    else:
        for line in _lines(proof):
            output.line(line)
        _show_exercised(proof)
    if proof.verdict in _UNPROVED:
        raise typer.Exit(Exit.NOT_FOUND)
    if proof.verdict != "proved":
        raise typer.Exit(Exit.JOB_FAILED)


def _objects_without_session(spec: dict[str, Any]) -> list[str]:
    """Return, as texts, the objects that the script of ``spec`` uses in its training loops and its Session does not have. These
    are copies of models and objects of the script's own classes; no checkpoint contains their state."""
    from pathlib import Path

    from ratchet_client.init.patch.diff import objects_without_session

    code, script = spec.get("code"), spec.get("script")
    if not (isinstance(code, dict) and isinstance(code.get("path"), str) and isinstance(script, list) and script):
        return []
    return objects_without_session(Path(code["path"], str(script[0])))


@contextmanager
def _service(ctx: typer.Context, spec: dict[str, Any], say: Progress) -> Iterator[RatchetClient]:
    """Yield a client of the user's service, if one is configured or ready; else of a temporary service, which is ended on
    exit."""
    from ratchet_client.cli.doctor.throwaway import temporary_service
    from ratchet_client.http.discovery import find_target, home_directory

    given = settings(ctx)
    with open_client(ctx, timeout=COMPARE_SECONDS) as client:
        if find_target(given.server, given.home).server is not None or client.ready():
            yield client
            return
    say("no service runs for the run directory: starting a private one on this machine ...")
    world = spec.get("world")
    ranks = world.get("ranks_per_node", 1) if isinstance(world, dict) else 1
    with temporary_service(home_directory(given.home), slots=2 * ranks if isinstance(ranks, int) else 2) as (
        client,
        _,
    ):
        yield client


def _lines(proof: Proof) -> list[str]:
    """Return the text output of a proof: the verdict, its causes or what was compared, and the differences."""
    from ratchet_client.cli.commands.compare import difference_lines

    of = "" if proof.total is None or proof.total == proof.steps else f" of {proof.total}"
    seen = (
        f"{pluralize(proof.comparison.tensors, 'tensor')}, every rank's state and {pluralize(proof.metrics, 'metric')} "
        f"after {proof.steps}{of} step{'s' * (proof.steps != 1)}"
    )
    found = proof.comparison
    if proof.verdict == "not-repeatable":
        found = found.model_copy(update={"advice": _why_not_repeatable(found)})
    elif proof.lost is not None:
        first = f"what the resume lost, listed above ({proof.lost}); the other differences may result from it"
        found = found.model_copy(update={"advice": first})
    different = [] if found.identical else difference_lines(found)
    if proof.verdict == "not-repeatable":
        return [
            f"NOT REPEATABLE: two undisturbed runs of {proof.what} differ: {_first(proof)}",
            "Training itself is not repeatable. The resume is not the cause, and no resume can be exact until this is fixed",
            *different,
            *_metrics(proof),
        ]
    if proof.verdict == "differs":
        how = "the interrupted run" if proof.interruptions else "the same steps done again"
        out = [f"DIFFERS: {how} of {proof.what} did not end as the undisturbed one: {_first(proof)}"]
        if proof.reports:
            out += ["Causes, from the resume reports:", *(f"  {text}" for text in proof.reports)]
        if proof.unseen:
            out.append(f"In no checkpoint, and perhaps the cause: {'; '.join(proof.unseen)}")
        return [*out, *different, *_metrics(proof)]
    done = (
        f"interrupted {pluralize(len(proof.interruptions), 'time')}, {pluralize(proof.redone, 'step')} done again"
        if proof.interruptions
        else "done again"
    )
    head = _UNPROVED.get(proof.verdict, "PROVED")
    out = [f"{head}: {proof.what}, {done}, ends with the same bits: {seen}"]
    out += [f"note: {text}" for text in proof.reports]
    out.append(f"not compared: files that the script itself writes{''.join(f'; {text}' for text in proof.unseen)}")
    if proof.times:
        out.append(f"not judged, since two runs from the same state differ in them: {', '.join(proof.times)}")
    return [*out, *_metrics(proof)]


def _why_not_repeatable(found: ComparisonView) -> str:
    """Return advice on why two undisturbed runs may differ. ``found``: their comparison."""
    names = join_first(found.unsaved)
    seen = f"training has changed {names}: if one of them is a generator, give it a fixed seed. Else " if names else ""
    return (
        f"{seen}look for a generator without a fixed seed, a seed that comes from the clock, an operation without a fixed order "
        "(determinism), data that change from run to run"
    )


def _first(proof: Proof) -> str:
    """Return, as text, where the two compared runs first differ."""
    from ratchet_client.cli.commands.compare import divergence_text

    found = proof.comparison
    if found.identical:
        if proof.metrics_differ:
            return "in metrics alone"
        return "in steps that were done again" if proof.reports else "they ended after different steps"
    return divergence_text(found)


def _metrics(proof: Proof) -> list[str]:
    """Return one line for each metric that differs, at most ``MAX_LINES`` and a line with the number of the others."""
    more = len(proof.metrics_differ) - MAX_LINES
    out = [f"metric {text}" for text in proof.metrics_differ[:MAX_LINES]]
    return [*out, *([f"... and {pluralize(more, 'more metric')}"] if more > 0 else [])]


def _show_exercised(proof: Proof) -> None:
    """Print a table of the parts of the spec and whether the proof exercised them."""
    if proof.exercised:
        output.line()
        output.table(("PART", "STATUS", "HOW"), [(one.name, one.status, one.detail) for one in proof.exercised])
