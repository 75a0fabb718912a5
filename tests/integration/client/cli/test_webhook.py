"""``ratchet webhook`` against a real service."""

from __future__ import annotations

from ratchet_client.client import RatchetClient
from tests.support.cli import Cli
from tests.support.server import Server


def test_webhook_commands(cli: Cli, idle_server: Server) -> None:
    assert "no webhook" in cli("webhook", "ls").errors
    wrong = cli("webhook", "add", "https://example.org/", "--type", "job.faild", expect=5)
    assert "did you mean 'job.failed'?" in wrong.errors
    made = cli("webhook", "add", "http://127.0.0.1:9/", "--type", "job.failed", "--label", "team=vision")
    assert made.text.startswith("whsec_") and "shown only once" in made.errors
    header, row = cli("webhook", "ls").text.splitlines()
    assert header.split() == ["ID", "STATE", "PENDING", "FORMAT", "URL"]
    webhook_id = row.split()[0]
    assert row.split()[1:] == ["enabled", "0", "standard", "http://127.0.0.1:9/"]
    shown = cli("webhook", "show", webhook_id)
    assert "team=vision" in shown.text and "no delivery" in shown.errors
    assert cli("webhook", "show", webhook_id, "--json").data["webhook"]["types"] == ["job.failed"]
    assert "127.0.0.1 is not public" in cli("webhook", "test", webhook_id, expect=1).errors
    rotated = cli("webhook", "rotate", webhook_id)
    assert rotated.text not in ("", made.text) and "24 hours" in rotated.errors
    with RatchetClient(home=idle_server.home) as client:
        assert [one.id for one in client.webhooks()] == [webhook_id]
        slack = client.create_webhook("https://hooks.slack.test/T/B/X", format="slack")
        assert slack.secret is None and client.webhook_deliveries(slack.id) == []
        client.delete_webhook(slack.id)
    assert "events wait" in cli("webhook", "disable", webhook_id).errors
    assert cli("webhook", "ls", "--json").data[0]["disabled_reason"] == "disabled by an admin"
    assert "enabled; 0 events" in cli("webhook", "enable", webhook_id).errors
    assert not cli("webhook", "disable", webhook_id, "--json").data["enabled"]
    assert "begins with new events" in cli("webhook", "enable", webhook_id, "--from-now").errors
    cli("webhook", "rm", webhook_id)
    assert "webhook ls" in cli("webhook", "show", webhook_id, expect=3).errors
