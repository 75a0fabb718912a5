"""``ratchet config``: which server, run directory and token this command line uses, and where each comes from."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import SETUP, JsonFlag, settings

if TYPE_CHECKING:
    from ratchet_client.discovery import Target

_SHOWN = 4
_LONG_ENOUGH = 16


class Key(StrEnum):
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
    """Show the server, run directory and token that commands use, each with where it comes from.

    An option comes before a variable, a variable before the configuration file, the file before ./.ratchet/service.json, and
    that before the one service of yours that runs.
    """
    if ctx.invoked_subcommand is not None:
        return
    from ratchet_client.discovery import SEVERAL, find_target
    from ratchet_client.errors import ServiceUnreachable
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
    if target.token is None:
        return None, "not set"
    source = target.token.source
    if server is None or target.token_for(server) is None:
        return None, f"the one in {source} belongs to {target.token_server or 'a server that is named'}; not sent"
    return masked(target.token.value), source


def masked(token: str) -> str:
    """The last characters of a long token, so that two can be told apart; nothing of a short one."""
    return "********" + (token[-_SHOWN:] if len(token) >= _LONG_ENOUGH else "")


def set_value(
    ctx: typer.Context,
    key: Key,
    value: Annotated[str | None, typer.Argument(metavar="URL", help="Address of the server. Not for a token.")] = None,
) -> None:
    """Set the server, or the token for it.

    `config set server URL` names the server. `config set token` asks for the token without showing it, or reads one line of
    standard input: an argument could be seen by others (ps). The token is stored for the server in use (--server, RATCHET_SERVER,
    the one set, or this machine's service that runs) and is sent to no other.
    """
    from ratchet_client.config_file import config_path, normalised, read_config, write_config
    from ratchet_client.discovery import find_target

    given, file = settings(ctx), config_path()
    config = read_config(file)
    if key is Key.SERVER:
        if value is None:
            raise typer.BadParameter("config set server takes an address: ratchet config set server http://host:8000")
        server = normalised(value)
        write_config(file, replace(config, server=server))
        target = find_target(given.server, given.home)
        stronger = target.server.source if target.server is not None else target.home.source
        output.note(f"commands talk to {server} from now on ({file})")
        if stronger != str(file):
            output.note(f"but not where {stronger} is given, as now: it comes before the file")
        return
    if value is not None:
        text = "a token is no argument, others could see it: `ratchet config set token` asks for it, or reads standard input"
        raise typer.BadParameter(text)
    owner = _owner(ctx, config.server)
    write_config(file, replace(config, token=_read_token(owner), token_server=owner))
    output.note(f"the token is sent to {owner} alone ({file})")


def _owner(ctx: typer.Context, stored: str | None) -> str:
    """The server that a new token is for: the one that is named, else the service of this machine that runs. Raises
    ``typer.BadParameter`` where there is none."""
    from ratchet_client.config_file import normalised
    from ratchet_client.discovery import find_target, is_loopback
    from ratchet_contract.errors import RatchetError

    given = settings(ctx)
    target = find_target(given.server, given.home)
    if target.server is not None:
        return target.server.value
    if stored is not None:
        return normalised(stored)
    with suppress(RatchetError):
        if is_loopback(url := target.url()):
            output.note(
                f"the token is for {url}; `ratchet serve --port {urlsplit(url).port}` has the service keep that address"
            )
            return normalised(url)
    raise typer.BadParameter("a token belongs to a server: `ratchet config set server URL` first, or --server URL")


def _read_token(owner: str) -> str:
    from getpass import getpass

    from ratchet_client.discovery import checked_token

    # Not typer.prompt: it asks first and turns the echo off afterwards.
    text = getpass(f"Token for {owner}: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not text.strip():
        raise typer.BadParameter("the token is empty: nothing was changed")
    return checked_token(text.strip())


def unset(key: Key) -> None:
    """Forget the server, or the token."""
    from ratchet_client.config_file import config_path, read_config, write_config

    file = config_path()
    config = read_config(file)
    if (config.server if key is Key.SERVER else config.token) is None:
        output.note(f"{key.value} is not set in {file}")
        return
    left = replace(config, server=None) if key is Key.SERVER else replace(config, token=None, token_server=None)
    write_config(file, left)
    output.note(f"{key.value} is forgotten ({file})")


def path() -> None:
    """Print where the configuration file is, or would be."""
    from ratchet_client.config_file import config_path

    output.line(str(config_path()))
