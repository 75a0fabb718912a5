"""The application: global options, error handling, and every command registered."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ratchet_client.cli import doctor, prove, run
from ratchet_client.cli.commands import (
    audit,
    checkpoints,
    compare,
    config,
    files,
    hook,
    hooks,
    init,
    job_actions,
    list_jobs,
    logs,
    metrics,
    queue,
    quota,
    report,
    serve,
    submit,
    token,
    top,
    trackers,
    usage,
    webhook,
)
from ratchet_client.cli.error_hints import hint
from ratchet_client.cli.shared.exit_codes import Exit, exit_code_for, help_lines
from ratchet_client.cli.shared.options import JOB_NAMED, Settings
from ratchet_contract.version import RATCHET_VERSION

if TYPE_CHECKING:
    from ratchet_contract.errors import RatchetError


class _Group(TyperGroup):
    """The group of all commands. A command's ``RatchetError`` becomes a message on standard error and an exit code."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        for text in help_lines(shutil.get_terminal_size().columns):
            typer.echo(text)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. A ``RatchetError`` is printed and becomes ``typer.Exit``. Ctrl-C and a closed standard output (exit
        code 0) become ``typer.Exit`` without a message."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            raise typer.Exit(Exit.INTERRUPTED) from None
        except BrokenPipeError:
            # The reader (`| head`) has exited; the interpreter's flush at exit must not report it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(Exit.OK) from None
        except Exception as error:
            # Imported here so that ``--help`` does not wait for the pydantic models.
            from ratchet_contract.errors import RatchetError

            if not isinstance(error, RatchetError):
                raise
            _report(error, ctx.meta.get(JOB_NAMED))
            raise typer.Exit(exit_code_for(error)) from None


def _report(error: RatchetError, job: str | None) -> None:
    """Print the error's message on standard error, then its field errors, and a hint if there is one. A single field error is
    left out if the message contains it. If there are several and the message repeats the first one, their number is printed
    instead of the message. ``job``: the job as named on the command line, for the hint."""
    sys.stdout.flush()
    several, first = len(error.errors) > 1, error.errors[0] if error.errors else None
    listed = several and first is not None and error.detail.startswith(f"{first.pointer or '/'}: {first.detail}")
    lines = [f"ratchet: {len(error.errors)} mistakes:" if listed else f"ratchet: {error.detail}"]
    if several or (error.errors and error.errors[0].detail not in error.detail):
        lines += [f"  {e.pointer or '/'}: {e.detail} [{e.code}]" for e in error.errors]
    following = hint(error, job)
    lines += [f"  next: {following}"] if following else []
    sys.stderr.write("\n".join(lines) + "\n")


def _version(value: bool) -> None:
    """Print the version and exit if the option ``--version`` is given."""
    if value:
        typer.echo(f"ratchet {RATCHET_VERSION}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            help="Address of the service, like http://host:8000. (default: RATCHET_SERVER, else `ratchet config`)"
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            help="Run directory; its service.json contains the address. (default: RATCHET_HOME, else ./.ratchet, else that of "
            "your only running service)"
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Training jobs that never slip back: submit DDP jobs, watch them, and have every interrupted one resumed bit for bit."""
    ctx.obj = Settings(server, home)


app = typer.Typer(
    name="ratchet", cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.callback()(_root)
for _module in (
    submit,
    run,
    prove,
    init,
    list_jobs,
    top,
    hook,
    metrics,
    logs,
    files,
    report,
    job_actions,
    checkpoints,
    compare,
    serve,
    hooks,
    trackers,
    queue,
    usage,
    quota,
    token,
    audit,
    webhook,
    config,
    doctor,
):
    _module.register(app)
