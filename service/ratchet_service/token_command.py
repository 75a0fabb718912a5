"""``python -m ratchet_service token``: tokens by the database itself, for whoever has that: the first one, and a way back in."""

from __future__ import annotations

import argparse
import re
import sys
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from ratchet_contract.access import OWNER_PATTERN, SCOPES, Role, Scope
from ratchet_contract.api_access import DEFAULT_DAYS, MAX_DAYS
from ratchet_service import tokens
from ratchet_service.listening import StartError
from ratchet_service.models import ApiToken
from ratchet_service.settings import Settings

_BY: str = "command line"


def add(commands: Any, database: argparse.ArgumentParser) -> None:
    """The command's parser, below ``commands``; ``database`` has the options that say which one."""
    group = commands.add_parser("token", help="make, list and revoke tokens, by the database itself")
    actions = group.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", parents=[database], help="make a token and print it, this once")
    create.add_argument("--owner", type=_owner, required=True, help="whose jobs it submits and acts on")
    create.add_argument("--role", type=Role, choices=list(Role), default=Role.SUBMITTER, help="(default: %(default)s)")
    create.add_argument(
        "--scope", action="append", type=Scope, choices=list(Scope), default=[], help="only this; may be repeated"
    )
    create.add_argument("--name", default="token", type=_name, help="what it is for")
    create.add_argument("--expires", type=_days, default=DEFAULT_DAYS, help="like 30d, or never (default: 90d)")
    actions.add_parser("list", parents=[database], help="all tokens, without their text")
    revoke = actions.add_parser("revoke", parents=[database], help="refuse a token from now on")
    revoke.add_argument("id", help="as `list` shows it")


def run(settings: Settings, options: argparse.Namespace) -> int:
    """Print what was made or found. Raises ``StartError``."""
    from ratchet_service.serve import open_database

    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    database = open_database(settings)
    try:
        if options.action == "list":
            with database.read() as session:
                rows = session.scalars(sa.select(ApiToken).order_by(ApiToken.created_at)).all()
            for row in rows:
                print(_line(row, database.clock.now()))
            return 0
        with database.write() as session:
            if options.action == "revoke":
                found = session.get(ApiToken, options.id)
                if found is None:
                    raise StartError(f"there is no token {options.id!r}: `token list` shows those that are")
                others = tokens.revoke(session, found, database.clock.now())
                print(f"{found.id} is refused from now on, and {others} made with it", file=sys.stderr)
                return 0
            if beyond := set(options.scope) - SCOPES[options.role]:
                raise StartError(f"the role {options.role} has not the scope {', '.join(sorted(beyond))}")
            _, text = tokens.make(
                session,
                name=options.name,
                owner=options.owner,
                role=options.role,
                scopes=options.scope,
                expires_at=None if options.expires is None else database.clock.now() + timedelta(days=options.expires),
                created_by=_BY,
            )
        print(text)
        print("keep it: nobody can show it again", file=sys.stderr)
        return 0
    finally:
        database.dispose()


def _line(row: ApiToken, now: datetime) -> str:
    if row.revoked_at is not None:
        state = "revoked"
    elif row.expires_at is not None and row.expires_at <= now:
        state = "expired"
    else:
        state = "never expires" if row.expires_at is None else f"until {row.expires_at:%Y-%m-%d}"
    return "  ".join([row.id, row.owner, row.role.value, ",".join(row.scopes) or "all", state, row.name])


def _owner(text: str) -> str:
    if re.fullmatch(OWNER_PATTERN, text) is None:
        raise argparse.ArgumentTypeError("lower case letters, digits and '-', up to 63, a letter first")
    return text


def _name(text: str) -> str:
    if re.fullmatch(r"[ -~]{1,63}", text) is None:
        raise argparse.ArgumentTypeError("1 to 63 printable ASCII characters")
    return text


def _days(text: str) -> float | None:
    if text == "never":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hd])", text)
    days = float(match[1]) / (24 if match[2] == "h" else 1) if match is not None else 0.0
    if not 0 < days <= MAX_DAYS:
        raise argparse.ArgumentTypeError(f"like 12h, 30d (at most {MAX_DAYS}d) or never")
    return days
