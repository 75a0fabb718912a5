"""``python -m ratchet_service token``: manages tokens directly in the database, to create the first one or to regain access."""

from __future__ import annotations

import argparse
import re
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from ratchet_contract.api.roles import OWNER_PATTERN, SCOPES, Role, Scope
from ratchet_contract.api.tokens import DEFAULT_DAYS, MAX_DAYS
from ratchet_service.config.settings import Settings
from ratchet_service.db import api_tokens, migrate
from ratchet_service.db.engine import Database, first_line, redacted_url
from ratchet_service.db.models import ApiToken
from ratchet_service.db.principal import LOCAL
from ratchet_service.errors import StartError

_BY: str = "command line"
_FIRST: str = "start the service first, which creates it (--home and --database-url set its location)"


def add_parser(commands: Any, database_options: argparse.ArgumentParser) -> None:
    """Add the parser of ``token`` to ``commands``; ``database_options`` has the options that select the database."""
    group = commands.add_parser("token", help="create, list and revoke tokens directly in the database")
    actions = group.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", parents=[database_options], help="create a token and print it once")
    create.add_argument("--owner", type=_owner, required=True, help="owner of the jobs that it submits and acts on")
    create.add_argument("--role", type=Role, choices=list(Role), default=Role.SUBMITTER, help="(default: %(default)s)")
    create.add_argument(
        "--scope", action="append", type=Scope, choices=list(Scope), default=[], help="only this scope; may be repeated"
    )
    create.add_argument("--name", default="token", type=_name, help="purpose of the token")
    create.add_argument("--expires", type=_days, default=DEFAULT_DAYS, help="like 30d, or never (default: 90d)")
    actions.add_parser("list", parents=[database_options], help="all tokens, without their text")
    revoke = actions.add_parser("revoke", parents=[database_options], help="revoke a token at once")
    revoke.add_argument("id", help="as `list` shows it")


def run(settings: Settings, options: argparse.Namespace) -> int:
    """Run ``create``, ``list`` or ``revoke``, print the result and return 0. Raises ``StartError``."""
    database = _open(settings)
    try:
        if options.action == "list":
            with database.read() as session:
                rows = session.scalars(sa.select(ApiToken).order_by(ApiToken.created_at)).all()
            for row in rows:
                print(_format_row(row, database.clock.now()))
            return 0
        with database.write(LOCAL) as session:
            if options.action == "revoke":
                found = session.get(ApiToken, options.id)
                if found is None:
                    raise StartError(f"there is no token {options.id!r}: `token list` shows all tokens")
                others = api_tokens.revoke(session, found, database.clock.now())
                print(f"{found.id} is revoked, and {others} made with it", file=sys.stderr)
                return 0
            if beyond := set(options.scope) - SCOPES[options.role]:
                raise StartError(f"the role {options.role} lacks the scope {', '.join(sorted(beyond))}")
            _, text = api_tokens.create(
                session,
                name=options.name,
                owner=options.owner,
                role=options.role,
                scopes=options.scope,
                expires_at=None if options.expires is None else database.clock.now() + timedelta(days=options.expires),
                created_by=_BY,
            )
        print(text)
        print("keep it: it is shown only once", file=sys.stderr)
        return 0
    finally:
        database.dispose()


def _open(settings: Settings) -> Database:
    """Open the database without migrating it: only the service migrates. Raises ``StartError`` for a missing one, or one that
    does not have this version's revision."""
    try:
        database = Database(settings.url)
    except ValueError as error:
        raise StartError(str(error)) from None
    displayed_url = redacted_url(database.url)
    try:
        if database.is_sqlite and not Path(database.url.database or "").exists():  # opening it would create it
            raise StartError(f"there is no database {displayed_url}: {_FIRST}")
        with database.read() as session:
            revision = migrate.revision_of(session.connection())
        if revision is None:
            raise StartError(f"the database {displayed_url} has no tables of Ratchet: {_FIRST}")
        if revision != migrate.head_revision():
            older = "start this version of the service, which migrates it, or use the version of the running service"
            refused = migrate.refusal(revision)
            raise StartError(
                refused.detail
                if refused is not None
                else f"the database {displayed_url} has revision {revision}, this version works with "
                f"{migrate.head_revision()}: {older}"
            )
    except SQLAlchemyError as error:
        database.dispose()
        raise StartError(f"the database {displayed_url} cannot be opened: {first_line(error)}") from error
    except StartError:
        database.dispose()
        raise
    return database


def _format_row(row: ApiToken, now: datetime) -> str:
    """Return one line of text about the token (id, owner, role, scopes, state, name), without the token's own text."""
    if row.revoked_at is not None:
        state = "revoked"
    elif row.expires_at is not None and row.expires_at <= now:
        state = "expired"
    else:
        state = "never expires" if row.expires_at is None else f"until {row.expires_at:%Y-%m-%d}"
    return "  ".join([row.id, row.owner, row.role.value, ",".join(row.scopes) or "all", state, row.name])


def _owner(text: str) -> str:
    """Return the argument if it is a valid owner. Raises ``ArgumentTypeError``."""
    if re.fullmatch(OWNER_PATTERN, text) is None:
        raise argparse.ArgumentTypeError("lower case letters, digits and '-', up to 63, a letter first")
    return text


def _name(text: str) -> str:
    """Return the argument if it is a valid token name. Raises ``ArgumentTypeError``."""
    if re.fullmatch(r"[ -~]{1,63}", text) is None:
        raise argparse.ArgumentTypeError("1 to 63 printable ASCII characters")
    return text


def _days(text: str) -> float | None:
    """Return the days of an argument such as ``12h`` or ``30d``; None for ``never``. Raises ``ArgumentTypeError``."""
    if text == "never":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([hd])", text)
    days = float(match[1]) / (24 if match[2] == "h" else 1) if match is not None else 0.0
    if not 0 < days <= MAX_DAYS:
        raise argparse.ArgumentTypeError(f"like 12h, 30d (at most {MAX_DAYS}d) or never")
    return days
