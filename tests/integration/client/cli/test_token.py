"""``ratchet token`` and what a team sees of owners, against a service that wants tokens."""

from __future__ import annotations

from pathlib import Path

from ratchet_contract.api.roles import Role
from ratchet_service.db.engine import Database, sqlite_url
from tests.support.cli import Cli
from tests.support.server import Server
from tests.support.tokens import make_token

SPEC = "name: NAME\ntask: {entrypoint: 'ratchet_worker.tasks.digits:DigitsTask'}\nworld: {device: cpu}\n"


def test_token_commands_create_list_and_revoke_and_jobs_show_owners(
    token_required_server: Server, tmp_path: Path
) -> None:
    root, ann = (Cli(token_required_server.home, tmp_path) for _ in range(2))
    stranger = root("token", "create", expect=5)
    assert "python -m ratchet_service token create" in stranger.errors and "config set token" in stranger.errors
    database = Database(sqlite_url(token_required_server.paths.database))
    root.environment["RATCHET_TOKEN"] = make_token(database, "root", Role.ADMIN)
    database.dispose()
    made = root("token", "create", "--owner", "ann", "--role", "submitter", "--expires", "2h", "--name", "laptop")
    assert made.text.startswith("rt_") and len(made.text.split()) == 1 and "it is shown only once" in made.errors
    ann.environment["RATCHET_TOKEN"] = made.text.strip()
    who = ann("token", "whoami", "--json").data
    assert (who["owner"], who["role"], who["token"]) == ("ann", "submitter", made.text.split("_")[1])

    (tmp_path / "job.yaml").write_text(SPEC.replace("NAME", "hers"))
    job_id = ann("submit", "job.yaml").text.strip()
    (tmp_path / "job.yaml").write_text(SPEC.replace("NAME", "his"))
    other = root("submit", "job.yaml").text.strip()
    refused = ann("cancel", other, expect=5)
    assert "belongs to root" in refused.errors and "ratchet token whoami" in refused.errors
    listed = ann("list").text.splitlines()
    assert "OWNER" in listed[0] and {line.split()[2] for line in listed[1:]} == {"ann", "root"}
    assert [job["id"] for job in ann("list", "--owner", "ann", "--json").data] == [job_id]
    assert "ann" in ann("get", job_id).text

    tokens = root("token", "list", "--json").data
    assert {token["owner"] for token in tokens} == {"root", "ann"}
    assert all(token["owner"] == "ann" for token in ann("token", "list", "--json").data)
    assert "laptop" in root("token", "list").text
    root("token", "revoke", who["token"])
    assert "was revoked" in ann("list", expect=5).errors
    assert "revoked" in root("token", "list", "--gone", "--owner", "ann").text
    for wrong in ("soon", "3w"):
        root("token", "create", "--expires", wrong, expect=2)
