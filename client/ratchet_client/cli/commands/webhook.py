"""``ratchet webhook``: endpoints of other programs that get jobs' events; for admins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import SETUP, JsonFlag, open_client

if TYPE_CHECKING:
    from ratchet_contract.api.webhooks import WebhookMade

Id = Annotated[str, typer.Argument(metavar="ID", help="As `ratchet webhook ls` shows it.")]
_DELIVERIES = 20


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Send jobs' events to other programs and to Slack.", no_args_is_help=True)
    for command in (add, ls, show, test, rm, enable, disable, rotate):
        group.command(command.__name__)(command)
    app.add_typer(group, name="webhook", rich_help_panel=SETUP)


def add(
    ctx: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="http or https.")],
    types: Annotated[
        list[str],
        typer.Option(
            "--type", help="Type of event, like job.failed or 'job.*'; may be repeated. (default: docs/webhooks.md)"
        ),
    ] = [],  # noqa: B006
    owner: Annotated[str | None, typer.Option(help="Only jobs of this owner.")] = None,
    label: Annotated[str | None, typer.Option(help="Only jobs with this label.", metavar="KEY=VALUE")] = None,
    slack: Annotated[bool, typer.Option("--slack", help="The URL is one of Slack's incoming webhooks.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Create a webhook and print its secret once."""
    with open_client(ctx) as client:
        made = client.create_webhook(
            url, types=types, owner=owner, label=label, format="slack" if slack else "standard"
        )
    _show_secret(made, as_json)


def _show_secret(made: WebhookMade, as_json: bool) -> None:
    """Print the secret of a webhook, and what to do with it."""
    if as_json:
        output.emit(made)
        return
    if made.secret is not None:
        output.line(made.secret)
        output.note(
            f"webhook {made.id}; keep its secret: it is shown only once; to try it: ratchet webhook test {made.id}"
        )
    elif made.format == "slack":
        output.note(f"webhook {made.id}; to try it: ratchet webhook test {made.id}")
    else:
        output.note(f"the response with the secret of {made.id} was lost: ratchet webhook rotate {made.id}")


def ls(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """List all webhooks."""
    with open_client(ctx) as client:
        found = list(client.webhooks())
    if as_json:
        output.emit(found)
        return
    rows = [[w.id, _state(w.enabled, w.failures), str(w.pending), w.format, w.url] for w in found]
    output.table(["ID", "STATE", "PENDING", "FORMAT", "URL"], rows, empty="no webhook")


def _state(enabled: bool, failures: int) -> str:
    """Return ``disabled``, ``failing`` or ``enabled``."""
    return "disabled" if not enabled else "failing" if failures else "enabled"


def show(ctx: typer.Context, webhook: Id, as_json: JsonFlag = False) -> None:
    """Show a webhook and its last deliveries."""
    with open_client(ctx) as client:
        view, last = client.webhook(webhook), client.webhook_deliveries(webhook, _DELIVERIES)
    if as_json:
        output.emit({"webhook": view.model_dump(mode="json"), "deliveries": [d.model_dump(mode="json") for d in last]})
        return
    output.fields(
        [("webhook", view.id), ("url", view.url), ("format", view.format), ("types", ", ".join(view.types)),
         ("owner", view.owner or "all"), ("label", view.label or "all"), ("state", _state(view.enabled, view.failures)),
         ("reason", view.disabled_reason), ("pending", str(view.pending)),
         ("new events after", output.format_time(view.new_after))]
    )  # fmt: skip
    rows = [
        [str(d.event_id), d.job_id, d.type, d.status, str(d.tries), str(d.answer or ""), d.error or ""] for d in last
    ]
    output.table(
        ["EVENT", "JOB", "TYPE", "STATUS", "TRIES", "ANSWER", "ERROR"], rows, drop=["ERROR"], empty="no delivery"
    )


def test(ctx: typer.Context, webhook: Id, as_json: JsonFlag = False) -> None:
    """Send a test event now; the exit code is 1 if it is not accepted."""
    with open_client(ctx) as client:
        result = client.test_webhook(webhook)
    if as_json:
        output.emit(result)
    else:
        output.note(f"accepted in {result.seconds:g} s" if result.delivered else f"not accepted: {result.error}")
    if not result.delivered:
        raise typer.Exit(1)


def rm(ctx: typer.Context, webhook: Id) -> None:
    """Delete a webhook."""
    with open_client(ctx) as client:
        client.delete_webhook(webhook)
    output.note(f"{webhook} is deleted")


def enable(
    ctx: typer.Context,
    webhook: Id,
    from_now: Annotated[
        bool, typer.Option("--from-now", help="Begin with new events; those that were not delivered are dropped.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Enable a webhook; it continues with the first event that was not delivered."""
    from ratchet_contract.api.webhooks import WebhookChange

    change = WebhookChange(enabled=True, from_now=True) if from_now else WebhookChange(enabled=True)
    with open_client(ctx) as client:
        view = client.change_webhook(webhook, change)
    if as_json:
        output.emit(view)
        return
    rest = "it begins with new events" if from_now else f"{view.pending} events to try again"
    output.note(f"{webhook} is enabled; {rest}")


def disable(ctx: typer.Context, webhook: Id, as_json: JsonFlag = False) -> None:
    """Disable a webhook; its events wait until it is enabled."""
    from ratchet_contract.api.webhooks import WebhookChange

    with open_client(ctx) as client:
        view = client.change_webhook(webhook, WebhookChange(enabled=False))
    if as_json:
        output.emit(view)
        return
    output.note(f"{webhook} is disabled; events wait: ratchet webhook enable {webhook}")


def rotate(ctx: typer.Context, webhook: Id, as_json: JsonFlag = False) -> None:
    """Make a new secret and print it once; the old one signs too for 24 hours."""
    with open_client(ctx) as client:
        made = client.rotate_webhook_secret(webhook)
    _show_secret(made, as_json)
    if not as_json and made.secret is not None:
        output.note("for 24 hours, each message is signed with the old secret, too")
