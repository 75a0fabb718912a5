"""``ratchet serve``, ``reconcile``, ``agent-host`` and ``agent``: replace this process with the service, one of its parts, or
an agent."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ratchet_client.cli.shared.exit_codes import Exit
from ratchet_client.cli.shared.options import SETUP, settings
from ratchet_contract import env_vars
from ratchet_contract.service_options import COMMANDS, Option


def register(app: typer.Typer) -> None:
    for name, command in COMMANDS.items():
        app.command(name, help=command.description, rich_help_panel=SETUP)(_service_command(name, command.options))
    app.command(rich_help_panel=SETUP)(agent)


def _service_command(name: str, options: tuple[Option, ...]) -> Callable[..., None]:
    """Return the function of the command ``name``. Typer reads the parameters of ``options`` from its signature."""

    def run(ctx: typer.Context, **values: Any) -> None:
        from ratchet_client.http.discovery import home_directory

        values["home"] = home_directory(values["home"] or settings(ctx).home)
        database_url = values.pop("database_url", None)
        arguments = [text for option in options for text in _arguments(option, values.get(option.name))]
        exec_module("ratchet_service", "fastapi", "service", [name, *arguments], database_url)

    context = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    run.__signature__ = Signature([context, *map(_parameter, options)])  # type: ignore[attr-defined]
    return run


def _arguments(option: Option, value: Any) -> list[str]:
    """Return the command line arguments that set ``option`` to ``value``; none if the value is None or False."""
    if option.kind is bool:
        return [option.flag] if value else []
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [text for one in values for text in (option.flag, str(one))]


def _parameter(option: Option) -> Parameter:
    """Return the parameter of a command for ``option``. A value is checked, and stays a text; None: the option is not given."""

    def check(text: str) -> str:
        try:
            option.parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return text

    if option.kind is bool:
        flag = typer.Option(option.flag, help=option.description)
        return Parameter(option.name, Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, flag])
    info = typer.Option(option.flag, help=option.description, metavar=option.value_name, parser=check)
    kind: Any = str if option.separator is None else list[str]
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info])


def agent(launch_file: Annotated[Path, typer.Argument(help="The attempt's launch.json.", exists=True)]) -> None:
    """Run one attempt's ranks on this machine. Called by launchers, rarely by hand."""
    exec_module("ratchet_worker.agent", "torch", "worker", [str(launch_file)])


def exec_module(
    module: str, required_module: str, extra: str, arguments: list[str], database_url: str | None = None
) -> NoReturn:
    """Replace this process with ``python -P -m module``. Raise ``typer.Exit`` if ``required_module`` is not installed; the
    printed error names the ``extra`` to install. ``database_url``: passed as a variable."""
    if find_spec(required_module) is None:
        command = shlex.join([sys.executable, "-m", "pip", "install", f"ratchet-train[{extra}]"])
        typer.echo(f"ratchet: this needs {required_module}, which {sys.executable} does not have: {command}", err=True)
        raise typer.Exit(Exit.FAULT)
    variables = dict(os.environ)
    if database_url is not None:
        variables[env_vars.DATABASE_URL] = database_url  # not an argument: it may hold a password
    # -P: a ``secrets.py`` or ``yaml.py`` in the current directory must not be imported.
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *arguments], variables)
