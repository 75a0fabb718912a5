"""``ratchet doctor``: checks whether this machine can run Ratchet, and prints what to do if it cannot."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.exit_codes import Exit
from ratchet_client.cli.shared.options import SETUP, JsonFlag, Settings, settings
from ratchet_contract.plural import pluralize

if TYPE_CHECKING:
    from ratchet_client.cli.doctor.checks import Diagnosis
    from ratchet_client.cli.doctor.exactness import Proof
    from ratchet_contract.doctor.findings import Finding


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=SETUP)(doctor)


def doctor(
    ctx: typer.Context,
    exactness: Annotated[
        bool, typer.Option("--exactness", help="Kill and resume a small job per hook and device, and compare the bits.")
    ] = False,
    hooks: Annotated[
        list[str],
        typer.Option("--hook", help="With --exactness: only this hook; may be repeated. (default: all but custom)"),
    ] = [],  # noqa: B006
    home: Annotated[
        Path | None, typer.Option(help="Run directory to check. (default: RATCHET_HOME, else ./.ratchet)")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Interpreter or virtual environment that trains. (default: this one)"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check whether this machine can run Ratchet, and print a remedy for each problem. Changes nothing."""
    if sys.platform == "win32":
        output.note("ratchet: doctor checks the training machine, which must run Linux: run it there, or in WSL2")
        raise typer.Exit(Exit.FAULT)
    from ratchet_client.cli.doctor.checks import run_checks
    from ratchet_client.cli.doctor.progress import Progress
    from ratchet_client.cli.shared.signals import interruptible

    if hooks and not exactness:
        raise typer.BadParameter("--hook selects hooks for --exactness: specify both")
    python = None if python is None else _interpreter(python)
    given = settings(ctx)
    wanted = _checked_hooks(hooks) if exactness else []
    chosen = Settings(given.server, home or given.home)
    with interruptible(), Progress() as progress:
        found = run_checks(chosen, python, progress)
    if not as_json:
        _show(found.findings)
    proofs: list[Proof] = []
    if exactness:
        from ratchet_client.http.discovery import home_directory

        proofs = _prove(found, home_directory(chosen.home), python, wanted)
        found.findings += [proof.finding() for proof in proofs]
        if not as_json:
            _show_proofs(proofs)
    if as_json:
        output.emit(found.findings)
    _summary(found.findings)
    if any(proof.identical is False for proof in proofs):
        raise typer.Exit(Exit.JOB_FAILED)
    if any(finding.status == "failed" for finding in found.findings):
        raise typer.Exit(Exit.FAULT)


def _interpreter(value: str) -> str:
    """Return the path of the interpreter that ``value`` names: a file, a virtual environment's directory, or a program on
    PATH. If none is found, return ``value``."""
    path = Path(value)
    return str(path / "bin" / "python") if path.is_dir() else shutil.which(value) or value


def _checked_hooks(hooks: list[str]) -> list[str]:
    """Return ``hooks``, or all available hooks but ``custom`` if it is empty. Raise ``typer.BadParameter`` for any other hook."""
    from ratchet_client.cli.doctor.exactness import available

    known = available()
    if strange := [name for name in hooks if name not in known]:
        raise typer.BadParameter(f"--hook {strange[0]}: available are {', '.join(known)}")
    return hooks or known


def _prove(diagnosis: Diagnosis, home: Path, python: str | None, hooks: list[str]) -> list[Proof]:
    """Run the jobs of the exactness check and return its proofs; may block for minutes. ``python``: the interpreter that trains;
    None: this one."""
    from ratchet_client.cli.doctor.exactness import prove
    from ratchet_client.cli.doctor.progress import Progress

    with Progress(lines=True) as progress:
        return prove(diagnosis, home, python, hooks, progress)


def _show(findings: list[Finding]) -> None:
    """Print the table of all checks, then the remedy of each check that is not ok, one per line."""
    output.table(("CHECK", "STATUS", "FOUND"), [(f.name, f.status, _found_text(f)) for f in findings])
    complaints = [f for f in findings if f.status != "ok"]
    if complaints:
        output.line()
    for finding in complaints:
        output.line(f"{finding.name}: {finding.cure}")


def _found_text(finding: Finding) -> str:
    return f"{finding.value} ({finding.detail})" if finding.detail else finding.value


def _show_proofs(proofs: list[Proof]) -> None:
    """Print the table of all proofs, then the problems of each, one per line."""
    output.line()
    output.table(
        ("HOOK", "DEVICE", "RANKS", "IDENTICAL", "TENSORS", "STEPS", "LOST", "SECONDS"),
        [proof.row() for proof in proofs],
        right=("RANKS", "TENSORS", "STEPS", "LOST", "SECONDS"),
    )
    for proof in proofs:
        for problem in proof.problems:
            output.line(f"{proof.hook} on {proof.device}: {problem}")


def _summary(findings: list[Finding]) -> None:
    """Print on standard error how many checks there were, and how many failed, have warnings or were not done."""
    bad, warned, open_ = (sum(f.status == status for f in findings) for status in ("failed", "warning", "not-checked"))
    words = (
        [f"{bad} failed"] * (bad > 0)
        + [pluralize(warned, "warning")] * (warned > 0)
        + [f"{open_} not checked"] * (open_ > 0)
    )
    output.note(f"{pluralize(len(findings), 'check')}: {', '.join(words) or 'all ok'}")
