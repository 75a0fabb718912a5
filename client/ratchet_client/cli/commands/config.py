"""``ratchet config``: shows the server, run directory and token in use, and stores the server and the token in the configuration
file."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import SETUP, JsonFlag, settings
from ratchet_contract import env_vars

if TYPE_CHECKING:
    from ratchet_client.http.discovery import Target

_VISIBLE_CHARS = 4
_LONG_ENOUGH = 16


class Key(StrEnum):
    """A setting that the configuration file stores."""

    SERVER = "server"
    TOKEN = "token"


def register(app: typer.Typer) -> None:
    group = typer.Typer(invoke_without_command=True)
    group.callback()(show)
    group.command("set")(set_value)
    group.command()(unset)
    group.command()(path)
    help_text = "Show or set the server and its token."
    app.add_typer(group, name="config", help=help_text, rich_help_panel=SETUP)


def show(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Show the server, run directory and token that commands use, each with its source.

    An option comes before a variable, a variable before the configuration file, the file before ./.ratchet, and that before
    the one service of yours that runs.
    """
    if ctx.invoked_subcommand is not None:
        return
    from ratchet_client.http.discovery import SEVERAL, find_target
    from ratchet_client.http.errors import ServiceUnreachable
    from ratchet_contract.errors import Refused

    given = settings(ctx)
    target = find_target(given.server, given.home)
    try:
        server, where = target.url(), target.server.source if target.server else "service.json in the run directory"
    except ServiceUnreachable:
        server, where = None, "no service is running for the run directory"
    except Refused as error:
        if error.code != SEVERAL:
            raise
        server, where = None, error.detail
    token, whose = _token_of(target, server)
    rows = {
        "server": (server, where), "home": (target.home.value, target.home.source), "token": (token, whose),
    }  # fmt: skip
    if as_json:
        output.emit({key: {"value": value, "source": source} for key, (value, source) in rows.items()})
        return
    output.fields((key, f"{output.dash(value)}  ({source})") for key, (value, source) in rows.items())


def _token_of(target: Target, server: str | None) -> tuple[str | None, str]:
    """Return the masked token that would be sent to ``server``, and its source; if none would be sent, None and the reason."""
    if target.token is None:
        return None, "not set"
    source = target.token.source
    if server is None or target.token_for(server) is None:
        return None, f"the token in {source} belongs to {target.token_server or 'an explicitly named server'}; not sent"
    return mask_token(target.token.value), source


def mask_token(token: str) -> str:
    """Return eight asterisks, followed by the last four characters of ``token`` if it has at least 16."""
    return "********" + (token[-_VISIBLE_CHARS:] if len(token) >= _LONG_ENOUGH else "")


def set_value(
    ctx: typer.Context,
    key: Key,
    value: Annotated[str | None, typer.Argument(metavar="URL", help="Address of the server. Not for a token.")] = None,
) -> None:
    """Set the server, or the token for it.

    `config set server URL` names the server. `config set token` asks for the token without showing it, or reads one line of
    standard input: an argument could be seen by others (ps). The token is stored for the server that commands use. This
    is the server of --server, RATCHET_SERVER or `config set server`, or a running service of this machine. The token is sent to
    no other server.
    """
    from ratchet_client.http.config_file import config_path, normalise_url, read_config, write_config
    from ratchet_client.http.discovery import find_target

    given, file = settings(ctx), config_path()
    config = read_config(file)
    if key is Key.SERVER:
        if value is None:
            raise typer.BadParameter("config set server takes an address: ratchet config set server http://host:8000")
        server = normalise_url(value)
        write_config(file, replace(config, server=server))
        target = find_target(given.server, given.home)
        stronger = target.server.source if target.server is not None else target.home.source
        output.note(f"commands now use {server} ({file})")
        if stronger != str(file):
            output.note(f"except where {stronger} is set, as now: it takes precedence over the file")
        return
    if value is not None:
        text = "a token cannot be an argument, others could see it: `ratchet config set token` prompts for it, or reads stdin"
        raise typer.BadParameter(text)
    owner = _token_server(ctx)
    write_config(file, replace(config, token=_read_token(owner), token_server=owner))
    output.note(f"the token is sent only to {owner} ({file})")


def _token_server(ctx: typer.Context) -> str:
    """Return the address of the server for which a new token is stored. This is the server that ``find_target`` takes from
    option, variable or configuration file. If it takes none, it is the running service, if this has a loopback address. Raise
    ``typer.BadParameter`` if there is no such server."""
    from ratchet_client.http.config_file import normalise_url
    from ratchet_client.http.discovery import find_target, is_loopback
    from ratchet_contract.errors import RatchetError

    given = settings(ctx)
    target = find_target(given.server, given.home)
    if target.server is not None:
        return target.server.value
    with suppress(RatchetError):
        if is_loopback(url := target.url()):
            output.note(
                f"the token is for {url}; `ratchet serve --port {urlsplit(url).port}` keeps the service at that address"
            )
            return normalise_url(url)
    if target.home.source in ("--home", env_vars.HOME):
        raise typer.BadParameter(
            f"{target.home.source} names the run directory {target.home.value}, for which no service runs: start it with "
            f"`ratchet serve`, leave {target.home.source} out to use the server that is set, or use --server URL"
        )
    raise typer.BadParameter(
        "a token is for one server: run `ratchet config set server URL` first, or use --server URL"
    )


def _read_token(owner: str) -> str:
    """Read the token from the terminal without echo, or as one line of standard input. Raise ``typer.BadParameter`` if it is
    empty, ``Refused`` if it is invalid."""
    from getpass import getpass

    from ratchet_client.http.discovery import validate_token

    # Not typer.prompt: it prints the prompt before it turns the echo off.
    text = getpass(f"Token for {owner}: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not text.strip():
        raise typer.BadParameter("the token is empty: nothing was changed")
    return validate_token(text.strip())


def unset(key: Key) -> None:
    """Remove the stored server or token."""
    from ratchet_client.http.config_file import config_path, read_config, write_config

    file = config_path()
    config = read_config(file)
    if (config.server if key is Key.SERVER else config.token) is None:
        output.note(f"{key.value} is not set in {file}")
        return
    left = replace(config, server=None) if key is Key.SERVER else replace(config, token=None, token_server=None)
    write_config(file, left)
    output.note(f"{key.value} is removed ({file})")


def path() -> None:
    """Print the path of the configuration file, whether or not it exists."""
    from ratchet_client.http.config_file import config_path

    output.line(str(config_path()))
