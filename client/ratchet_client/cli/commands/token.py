"""``ratchet token``: creates, lists and revokes tokens, and shows whose token is sent."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import SETUP, JsonFlag, open_client

if TYPE_CHECKING:
    from ratchet_contract.api.tokens import TokenView


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True)
    for name, command in (("create", create), ("list", list_), ("revoke", revoke), ("whoami", whoami)):
        group.command(name)(command)
    app.add_typer(group, name="token", help="Make, list and revoke tokens for the service.", rich_help_panel=SETUP)


def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Option("--name", help="Purpose of the token.")] = "token",
    owner: Annotated[
        str | None, typer.Option(help="Owner whose jobs it submits and acts on. (default: your own name)")
    ] = None,
    role: Annotated[str | None, typer.Option(help="viewer, submitter or admin. (default: your own)")] = None,
    scope: Annotated[list[str], typer.Option("--scope", help="Only this permission; may be repeated.")] = [],  # noqa: B006
    expires: Annotated[
        str | None, typer.Option(help="Lifetime, like 12h, 30d or never. (default: 90d, or as long as your own)")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a token and print it once. For the first token of a service, use: python -m ratchet_service token create."""
    days = _days(expires)
    with open_client(ctx) as client:
        made = client.create_token(name, owner=owner, role=role, scopes=scope, expires_days=days)
    if as_json:
        output.emit(made)
        return
    if made.token is None:
        output.note(
            f"the response with the token's text was lost: run ratchet token revoke {made.id}, then create it again"
        )
        return
    output.line(made.token)
    ends = "never ends" if made.expires_at is None else f"ends {output.format_time(made.expires_at)}"
    output.note(f"token {made.id} of {made.owner} ({made.role}) {ends}; keep it: it is shown only once")


def _days(text: str | None) -> float | Literal["never"] | None:
    """Return the lifetime ``text``, like ``12h`` or ``30d``, in days; "never" and None are returned unchanged. Raise
    ``typer.BadParameter`` for other texts."""
    if text is None or text == "never":
        return None if text is None else "never"
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([hd])", text)
    if match is None:
        raise typer.BadParameter(f"--expires takes 12h, 30d or never, not {text!r}")
    return float(match[1]) / (24 if match[2] == "h" else 1)


def list_(
    ctx: typer.Context,
    owner: Annotated[str | None, typer.Option(help="Only of this owner.")] = None,
    gone: Annotated[bool, typer.Option("--gone", help="Include revoked and expired tokens.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List your tokens (an admin: everybody's), without their text."""
    with open_client(ctx) as client:
        found = list(client.tokens(owner=owner, gone=gone))
    if as_json:
        output.emit(found)
        return
    output.table(
        ["ID", "OWNER", "ROLE", "SCOPES", "ENDS", "USED", "NAME"],
        [
            [t.id, t.owner, str(t.role), ",".join(t.scopes) or "all", _expiry_text(t), output.age(t.last_used_at), t.name]
            for t in found
        ],
        drop=["USED", "NAME", "SCOPES"], empty="no token",
    )  # fmt: skip


def _expiry_text(token: TokenView) -> str:
    """Return when the token expires, "never", or "revoked"."""
    if token.revoked_at is not None:
        return "revoked"
    return output.format_time(token.expires_at) or "never"


def revoke(
    ctx: typer.Context,
    token: Annotated[str, typer.Argument(metavar="ID", help="As `ratchet token list` shows it.")],
    as_json: JsonFlag = False,
) -> None:
    """Revoke a token and all tokens created with it."""
    with open_client(ctx) as client:
        gone = client.revoke_token(token)
    if as_json:
        output.emit(gone)
        return
    others = f", and {gone.also_revoked} made with it" if gone.also_revoked else ""
    output.note(f"token {gone.id} of {gone.owner} is refused from now on{others}")


def whoami(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Show your owner name, role and permissions on the service."""
    with open_client(ctx) as client:
        found = client.whoami()
    if as_json:
        output.emit(found)
        return
    output.fields(
        [("owner", found.owner), ("role", found.role), ("scopes", ", ".join(found.scopes)),
         ("token", found.token or "none, and none is needed here"), ("ends", output.format_time(found.expires_at))]
    )  # fmt: skip
