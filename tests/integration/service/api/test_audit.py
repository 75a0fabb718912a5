"""The audit log: each change leaves one row, in its transaction; rows stay; everyone sees what concerns them."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.roles import Role, Scope
from ratchet_contract.code import tree
from ratchet_contract.code.archive import write_archive
from ratchet_contract.phases import JobPhase
from ratchet_contract.protocol.messages import ForkSource
from ratchet_service.__main__ import main
from ratchet_service.db import audit
from ratchet_service.db.engine import Database, sqlite_url, utc_now
from ratchet_service.db.models import AuditEntry, Job
from ratchet_service.db.principal import LOCAL
from ratchet_service.reconciler.ttl import Expiry
from ratchet_service.usecases import adopt_run, submit
from tests.support.api import Api, checkpoint_message, spec, training_message
from tests.support.checkpoints import make_checkpoint
from tests.support.team import Team, problem_status_and_code, team, token_required_service

__all__ = ["team", "token_required_service"]

NOT_AUDITED = {"POST /v1/jobs/{job_id}/attempts/{number}/reports", "POST /v1/webhooks/{webhook_id}/test"}
"""Reports of agents: what a job itself does, which its history has. A test of a webhook changes nothing."""


class Log:
    """Sends requests and checks what each of them adds to the audit log."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.covered: set[str] = set()
        self.seen = max((row.id for row in self._rows(0)), default=0)

    def _rows(self, after: int) -> list[AuditEntry]:
        with self.database.read() as session:
            return list(session.scalars(sa.select(AuditEntry).where(AuditEntry.id > after).order_by(AuditEntry.id)))

    def new(self) -> list[AuditEntry]:
        rows = self._rows(self.seen)
        self.seen = max([self.seen, *(row.id for row in rows)])
        return rows

    def change(self, client: httpx.Client, route: str, action: str, ids: dict[str, str], **request: Any) -> AuditEntry:
        """Send a request that changes something, twice if it may be repeated by its key, and return its one row."""
        self.new()
        method, path = route.split()
        if method == "POST":
            request["headers"] = {"Idempotency-Key": str(uuid.uuid4())}
        answer = client.request(method, path.format(**ids), **request)
        assert answer.is_success, answer.text
        (row,) = self.new()
        assert (row.action, row.actor) == (action, client.get("/v1/whoami").json()["owner"])
        if method == "POST":
            again = client.request(method, path.format(**ids), **request)
            assert (again.headers["idempotency-replayed"], self.new()) == ("true", [])
        self.covered.add(route)
        return row


def tree_of(api: Api, name: str) -> tuple[str, bytes]:
    root = api.settings.home / name
    root.mkdir()
    (root / "train.py").write_text(name)
    found = tree.list_entries(root)
    return tree.tree_digest(found), b"".join(write_archive(found))


def trained_job(api: Api, **changes: Any) -> tuple[str, str]:
    """Job and checkpoint: a running job with a checkpoint on the disk."""
    job = api.submit(**changes)
    api.attempt(job)
    saved = make_checkpoint(
        api.settings.paths.job(job).checkpoints, 5, 1, job_id=job, hook=api.job(job)["spec"]["hook"]
    )
    facts = {"digest": saved.digest, "size": saved.size, "files": len(saved.files)}
    message = checkpoint_message(5, **facts) | {"parent": saved.parent.model_dump()}
    assert api.report(job, (0, 1, [training_message(), message])).status_code == 200
    return job, saved.id


def test_every_request_that_changes_something_leaves_one_row(team: Team) -> None:
    api, log = team.api(team.ann), Log(team.database)
    row = log.change(team.ann, "POST /v1/jobs", "submit", {}, json=spec(name="first"))
    assert (row.actor, row.role, row.token_name, row.owner) == ("ann", Role.SUBMITTER, "test", "ann")
    assert (row.subject_kind, row.data["name"]) == ("job", "first") and row.token is not None
    job, checkpoint = trained_job(api)
    ids = {"job_id": job, "checkpoint_id": checkpoint}
    of = "/v1/jobs/{job_id}"
    at = f"{of}/checkpoints/{{checkpoint_id}}"
    log.change(team.ann, f"POST {of}/checkpoint", "checkpoint", ids)
    row = log.change(team.ann, f"POST {at}/verify", "verify", ids)
    assert row.data == {"checkpoint": checkpoint, "verification": "ok", "state": "committed"}
    assert log.change(team.ann, f"POST {at}/pin", "pin", ids).data == {"checkpoint": checkpoint}
    log.change(team.ann, f"POST {at}/pin", "unpin", ids, json={"pinned": False})
    fork = log.change(team.ann, f"POST {of}/fork", "fork", ids)
    assert fork.subject != job and fork.data["source"] == f"{job}/{checkpoint}"
    # an admin acts on another owner's job
    row = log.change(team.root, f"POST {of}/preempt", "preempt", ids)
    assert (row.actor, row.role, row.owner, row.subject) == ("root", Role.ADMIN, "ann", job)
    assert row.data["desired"] == {"old": "run", "new": "preempt"}
    api.set_phase(job, JobPhase.RUNNING)
    log.change(team.ann, f"POST {of}/suspend", "suspend", ids)
    api.set_phase(job, JobPhase.SUSPENDED)
    row = log.change(team.ann, f"POST {of}/resume", "resume", ids, json={"hook": {"name": "allreduce"}, "from_step": 5,
                                                                        "on_hook_mismatch": "reset"})  # fmt: skip
    assert row.data["phase"] == {"old": "SUSPENDED", "new": "QUEUED"} and row.data["from_step"] == 5
    assert any("powerSGD" in text and "allreduce" in text for text in row.data["changes"])
    assert log.change(team.ann, f"POST {of}/cancel", "cancel", ids).data["phase"]["new"] == "CANCELLED"
    row = log.change(team.ann, f"PATCH {of}", "patch", ids, json={"priority": 7, "labels": {"team": "x"}})
    assert row.data == {"priority": {"old": 0, "new": 7}, "labels": {"team": {"old": None, "new": "x"}}}
    paths = api.settings.paths.job(job)
    (paths.checkpoints / "step-000000000099.a0001").mkdir()  # the remains of a save
    row = log.change(team.ann, f"POST {of}/checkpoints/prune", "prune", ids, json={})
    assert row.data == {"checkpoints": 1, "quarantined": 0}
    paths.work_dir.mkdir()
    (paths.work_dir / "out.txt").write_text("x")
    row = log.change(team.ann, f"DELETE {of}", "delete", ids, params={"keep_checkpoints": True})
    assert row.data == {"name": "digits", "phase": "CANCELLED", "keep_checkpoints": True, "outputs": False}
    assert (row.subject, row.owner) == (job, "ann")
    row = log.change(team.root, f"DELETE {of}", "delete-outputs", ids, params={"outputs": True})
    assert (row.actor, row.subject, row.owner) == ("root", job, "ann") and not paths.work_dir.exists()
    digest, sent = tree_of(api, uuid.uuid4().hex)
    tar = {"Content-Type": "application/x-tar"}
    row = log.change(team.ann, "PUT /v1/code/{digest}", "upload", {"digest": digest}, content=sent, headers=tar)
    assert (row.subject_kind, row.subject, row.owner) == ("code", digest, "ann")
    row = log.change(
        team.root, "POST /v1/tokens", "create-token", {}, json={"name": "ci", "owner": "ann", "role": "viewer"}
    )
    assert (row.actor, row.owner, row.subject_kind, row.data["name"]) == ("root", "ann", "token", "ci")
    row = log.change(team.root, "DELETE /v1/tokens/{token_id}", "revoke-token", {"token_id": row.subject})
    assert row.data == {"name": "ci", "also_revoked": 0}
    row = log.change(team.root, "PUT /v1/quotas/{owner}", "set-quota", {"owner": "ann"}, json={"jobs": 2})
    assert (row.subject_kind, row.subject, row.owner, row.data) == (
        "quota",
        "ann",
        "ann",
        {"jobs": {"old": None, "new": 2}},
    )
    row = log.change(team.root, "DELETE /v1/quotas/{owner}", "delete-quota", {"owner": "ann"})
    assert row.data == {"jobs": {"old": 2, "new": None}}
    hook = {"url": "https://receiver.example/secret-path"}
    row = log.change(team.root, "POST /v1/webhooks", "create-webhook", {}, json=hook)
    ids, one = {"webhook_id": row.subject}, "/v1/webhooks/{webhook_id}"
    assert (row.subject_kind, row.owner, row.data) == ("webhook", "root", {"format": "standard"})
    row = log.change(team.root, f"PATCH {one}", "change-webhook", ids, json={"enabled": False})
    assert row.data == {"changed": ["enabled"]}
    log.change(team.root, f"POST {one}/rotate", "rotate-webhook", ids)
    log.change(team.root, f"DELETE {one}", "delete-webhook", ids)
    described = team.nobody.get("/openapi.json").json()["paths"]
    changing = {
        f"{method.upper()} {path}"
        for path, item in described.items()
        for method in item
        if method not in ("get", "head")
    }
    assert log.covered == changing - NOT_AUDITED, "a route that changes something needs a row in the audit log"


def test_requests_that_change_nothing_leave_no_row(team: Team) -> None:
    api = team.api(team.ann)
    job, checkpoint = trained_job(api)
    digest, sent = tree_of(api, uuid.uuid4().hex)
    put_code = {"content": sent, "headers": {"Content-Type": "application/x-tar"}}
    team.ann.put(f"/v1/code/{digest}", **put_code)
    made = team.ann.post("/v1/tokens", json={}).json()["id"]
    assert team.ann.delete(f"/v1/tokens/{made}").status_code == 200
    assert team.root.put("/v1/quotas/ann", json={"queued": 1}).status_code == 200
    assert team.ann.post(f"/v1/jobs/{job}/suspend").status_code == 202
    log = Log(team.database)
    path = f"/v1/jobs/{job}"
    requests: list[tuple[httpx.Client, str, str, dict[str, Any], int]] = [
        (team.ann, "POST", "/v1/jobs", {"json": spec(), "params": {"dry_run": True}}, 200),
        (team.ann, "POST", "/v1/jobs", {"json": spec()}, 409),  # beyond the quota
        (team.ann, "POST", "/v1/jobs", {"json": spec(hook={"name": "none-such"})}, 422),
        (team.ann, "POST", f"{path}/suspend", {}, 202),  # again
        (team.ann, "POST", f"{path}/fork", {}, 409),
        (team.bob, "POST", f"{path}/cancel", {}, 403),
        (team.ann, "DELETE", path, {}, 409),
        (team.ann, "PATCH", path, {"json": {"priority": 0, "labels": {}}}, 200),
        (team.ann, "PATCH", path, {"json": {"priority": 5}, "headers": {"If-Match": '"0"'}}, 412),
        (team.ann, "POST", f"{path}/checkpoints/{checkpoint}/pin", {"json": {"pinned": False}}, 200),
        (team.ann, "POST", f"{path}/checkpoints/prune", {"json": {"dry_run": True}}, 200),
        (team.ann, "POST", f"{path}/checkpoints/prune", {"json": {}}, 200),
        (team.ann, "PUT", f"/v1/code/{digest}", put_code, 200),
        (team.ann, "PUT", "/v1/code/" + "0" * 64, put_code, 422),
        (team.ann, "POST", "/v1/tokens", {"json": {"role": "admin"}}, 403),
        (team.ann, "DELETE", f"/v1/tokens/{made}", {}, 200),  # again
        (team.root, "PUT", "/v1/quotas/ann", {"json": {"queued": 1}}, 200),  # again
        (team.ann, "PUT", "/v1/quotas/ann", {"json": {"queued": 9}}, 403),
        (team.root, "DELETE", "/v1/quotas/bob", {}, 404),
    ]
    for client, method, url, request, status in requests:
        answer = client.request(method, url, **request)
        assert answer.status_code == status, (method, url, answer.text)
        assert log.new() == [], (method, url)


def test_change_that_is_rolled_back_leaves_no_row(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(api.database)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("between the change and its commit")

    monkeypatch.setattr("ratchet_service.api.routes.jobs.job_view", fail)
    assert api.client.post("/v1/jobs", json=spec()).status_code == 500
    with api.database.read() as session:
        assert session.scalar(sa.select(sa.func.count()).select_from(Job)) == 0
    assert log.new() == []


def test_adoption_ttl_and_token_command_are_recorded(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(api.database)
    adopted = adopt_run.PreparedAdoption(
        submit.prepare(spec(), api.submission), submit.new_job_id(),
        ForkSource(job_root="/run", adopted="/run", step=5, attempt=1, digest="d"),
    )  # fmt: skip
    with api.database.write() as session:
        job = adopt_run.store(session, adopted, "ann", api.settings.paths).id
    (row,) = log.new()
    assert (row.action, row.subject, row.data["source"]) == ("adopt", job, "/run")
    api.set_phase(job, JobPhase.SUCCEEDED, ttl=0.0)
    Expiry(api.database, api.settings.paths).run()
    (row,) = log.new()
    assert (row.action, row.actor, row.role, row.subject, row.owner) == ("delete", None, None, job, "ann")
    place = ["--home", str(api.settings.home), "--database-url", api.database.url.render_as_string(hide_password=False)]
    assert main(["token", "create", "--owner", "ann", "--role", "viewer", *place]) == 0
    (row,) = log.new()
    assert (row.action, row.actor, row.role, row.owner) == ("create-token", "local", Role.ADMIN, "ann")
    text = capsys.readouterr().out.strip()
    assert text.startswith("rt_") and text[12:] not in json.dumps(row.data)
    assert main(["token", "revoke", row.subject, *place]) == 0
    assert [(row.action, row.actor) for row in log.new()] == [("revoke-token", "local")]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET actor = 'eve'",
        "DELETE FROM audit",
        "TRUNCATE audit",
        "INSERT OR REPLACE INTO audit SELECT * FROM audit",
    ],
)
def test_database_refuses_to_change_or_delete_rows(api: Api, statement: str) -> None:
    if statement.startswith("TRUNCATE" if api.database.is_sqlite else "INSERT"):
        pytest.skip("this statement exists only on the other database, where this test runs it")
    job = api.submit()
    with pytest.raises(sa.exc.DBAPIError, match="only ever added"), api.database.write() as session:
        session.execute(sa.text(statement))
    assert listed(api.client, subject=job)[0]["actor"] == "local"


def test_backup_contains_the_rows_and_refuses_to_change_them(api: Api, tmp_path: Path) -> None:
    if not api.database.is_sqlite:
        pytest.skip("ratchet_service backup copies SQLite only: the test on SQLite runs it")
    job, copy = api.submit(), tmp_path / "copy.db"
    url = api.database.url.render_as_string(hide_password=False)
    assert main(["backup", str(copy), "--home", str(api.settings.home), "--database-url", url]) == 0
    database = Database(sqlite_url(copy))
    with database.read() as session:
        assert session.scalars(sa.select(AuditEntry.action).where(AuditEntry.subject == job)).all() == ["submit"]
    with pytest.raises(sa.exc.DBAPIError, match="only ever added"), database.write() as session:
        session.execute(sa.delete(AuditEntry))
    database.dispose()


def test_rows_have_no_secret_value(api: Api) -> None:
    log, secret = Log(api.database), "s3cret-value"
    job = api.submit(env={"KEY": secret}, secret_env=["KEY"])
    api.set_phase(job, JobPhase.SUSPENDED)
    assert api.client.post(f"/v1/jobs/{job}/resume", json={"hook": {"name": "allreduce"}}).status_code == 200
    rows = log.new()
    assert len(rows) == 2 and secret not in json.dumps([row.data for row in rows])


def listed(client: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    """All entries of a query, by pages of two."""
    out: list[dict[str, Any]] = []
    cursor = None
    while True:
        answer = client.get("/v1/audit", params={"limit": 2} | query | ({"cursor": cursor} if cursor else {}))
        assert answer.status_code == 200, answer.text
        page = answer.json()
        out += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return out


def test_admins_see_all_changes_and_others_their_own(team: Team) -> None:
    since = datetime.now(UTC).isoformat()
    of_ann, of_bob = team.api(team.ann).submit(), team.api(team.bob).submit()
    team.root.post(f"/v1/jobs/{of_ann}/cancel")
    team.root.put("/v1/quotas/bob", json={"jobs": 3})

    def seen(client: httpx.Client, **query: Any) -> list[tuple[str, str]]:
        return [(entry["action"], entry["subject"]) for entry in listed(client, since=since, **query)]

    submit_ann, submit_bob, cancel = ("submit", of_ann), ("submit", of_bob), ("cancel", of_ann)
    quota = ("set-quota", "bob")
    assert seen(team.root) == [quota, cancel, submit_bob, submit_ann]
    assert seen(team.ann) == [cancel, submit_ann]
    assert seen(team.bob) == [quota, submit_bob]
    assert seen(team.eve) == seen(team.ann, subject=of_bob) == seen(team.ann, owner="bob") == []
    assert seen(team.root, actor="root") == [quota, cancel]
    assert seen(team.root, owner="ann") == [cancel, submit_ann]
    assert seen(team.root, action="submit", subject=of_ann) == [submit_ann]
    assert seen(team.ann, actor="root") == [cancel]
    assert problem_status_and_code(team.nobody.get("/v1/audit")) == (401, "token-missing")


def test_tokens_revoked_with_their_maker_have_a_row_each(team: Team) -> None:
    maker = team.root.post("/v1/tokens", json={"name": "maker"}).json()
    for_ann = (
        team.client(maker["token"]).post("/v1/tokens", json={"name": "a", "owner": "ann", "role": "viewer"}).json()
    )
    assert team.root.delete(f"/v1/tokens/{maker['id']}").json()["also_revoked"] == 1
    assert team.root.delete(f"/v1/tokens/{maker['id']}").json()["also_revoked"] == 0
    (row,) = listed(team.ann, action="revoke-token", subject=for_ann["id"])
    assert (row["actor"], row["owner"], row["data"]) == ("root", "ann", {"name": "a", "with": maker["id"]})
    (row,) = listed(team.root, action="revoke-token", subject=maker["id"])
    assert row["data"] == {"name": "maker", "also_revoked": 1}


def test_changes_to_tokens_need_the_scope_that_lists_tokens(team: Team) -> None:
    made = team.ann.post("/v1/tokens", json={"name": "ci"}).json()["id"]
    reader = team.member("ann", Role.SUBMITTER, Scope.JOBS_READ)
    assert [entry["subject"] for entry in listed(team.ann, action="create-token", subject=made)] == [made]
    assert listed(reader, action="create-token") == listed(reader, subject=made) == []
    admin = team.member("root", Role.ADMIN, Scope.JOBS_READ)
    job = team.api(team.ann).submit()
    assert "token" not in {entry["subject_kind"] for entry in listed(admin, owner="ann")}
    assert [entry["subject"] for entry in listed(reader, subject=job)] == [job]


def test_token_of_the_owner_local_does_not_show_changes_without_a_token(team: Team) -> None:
    local = team.member(LOCAL.owner, Role.SUBMITTER)
    job = team.api(local).submit()
    with team.database.write(LOCAL) as session:
        audit.record(session, AuditAction.SET_QUOTA, "quota", "ann", "ann", {})
    assert {entry["owner"] for entry in listed(local)} == {"local"}
    assert [entry["actor"] for entry in listed(local, subject=job)] == ["local"]
    assert "quota" in {entry["subject_kind"] for entry in listed(team.root, actor="local", owner="ann")}


def test_list_is_by_time_and_pages_to_the_end(api: Api) -> None:
    job, begin = api.submit(), utc_now() - timedelta(days=1000)
    with api.database.write() as session:
        facts = {"action": "patch", "subject_kind": "job", "subject": job, "owner": "ann", "data": {}}
        # times with repetitions, not in the order of the ids
        session.add_all(AuditEntry(at=begin + timedelta(seconds=n * 7 % 5), **facts) for n in range(11))
    found = listed(api.client, subject=job, action="patch")
    assert len(found) == len({entry["id"] for entry in found}) == 11
    assert found == sorted(found, key=lambda entry: (entry["at"], entry["id"]), reverse=True)
    middle = (begin + timedelta(seconds=2)).isoformat()
    parts = [listed(api.client, subject=job, action="patch", **{key: middle}) for key in ("since", "until")]
    assert parts[0] + parts[1] == found and len(parts[0]) == 6
    cursor = api.client.get("/v1/audit", params={"limit": 1}).json()["next_cursor"]
    wrong = api.client.get("/v1/audit", params={"limit": 1, "cursor": cursor, "actor": "ann"})
    assert problem_status_and_code(wrong) == (400, "bad-cursor")
    for query in ({"since": "2026-01-01T00:00:00"}, {"until": "0001-01-01T00:00:00+14:00"}, {"action": "none-such"}):
        assert api.client.get("/v1/audit", params=query).status_code == 422, query
