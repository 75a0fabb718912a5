"""Pages for a browser: what they load, which is all theirs, and what a Content-Security-Policy lets them do."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from tests.support.api import Api
from tests.support.docs import ROOT
from tests.support.server import Server
from tests.support.team import Team, team, token_required_service

__all__ = ["team", "token_required_service"]
KINDS = {"js": "text/javascript", "css": "text/css"}


def policy_of(text: str) -> dict[str, str]:
    return dict(part.strip().partition(" ")[::2] for part in text.split(";"))


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_pages_load_nothing_from_other_origins(api: Api, page: str) -> None:
    answer = api.client.get(page)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = policy_of(answer.headers["content-security-policy"])
    assert (
        policy["default-src"] == "'none'"
        and policy["connect-src"] == "'self'"
        and policy["frame-ancestors"] == "'none'"
    )
    assert not re.search(r"https?:|\*|unsafe-eval", answer.headers["content-security-policy"])
    assert "'unsafe-inline'" not in policy["script-src"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    loaded = re.findall(r"(?:src|href)=\"([^\"]*)\"", answer.text)
    assert not [name for name in loaded if re.match(r"(?!data:)\w+:|//", name)], loaded


def test_docs_page_is_served_from_files_of_the_installation(api: Api) -> None:
    page = api.client.get("/docs").text
    loaded = [name for name in re.findall(r"(?:src|href)=\"([^\"]*)\"", page) if not name.startswith("data:")]
    files = {name: api.client.get(urljoin("/docs", name)) for name in loaded}
    assert {answer.status_code for answer in files.values()} == {200}
    for name, answer in files.items():
        assert answer.headers["content-type"].startswith(KINDS[name.rpartition(".")[2]]), name
        assert answer.headers["x-content-type-options"] == "nosniff"
    scripts = "".join(answer.text for answer in files.values())
    assert ".swagger-ui" in scripts and "SwaggerUIBundle" in scripts
    assert "<script>" not in page, "the policy runs no script that stands in the page"
    started = files["docs/docs.js"].text
    assert "validatorUrl: null" in started, "else each look tells the makers of Swagger UI the service's address"
    [description] = re.findall(r'url: "([^"]+)"', started)
    assert api.client.get(urljoin("/docs", description)).json()["info"]["title"] == "Ratchet"
    assert api.client.get("/docs/other.js").json()["code"] == "invalid-parameter"


def test_docs_page_is_public_with_tokens_and_declares_bearer_authentication(team: Team) -> None:
    assert [team.nobody.get(path).status_code for path in ("/docs", "/docs/swagger-ui.css", "/openapi.json")] == [
        200
    ] * 3
    assert team.nobody.get("/v1/jobs").status_code == 401
    document = team.nobody.get("/openapi.json").json()
    scheme = document["components"]["securitySchemes"]["token"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer"), "what *Authorize* asks for"


def test_jobs_page_runs_only_its_hashed_script_and_inserts_no_markup(api: Api) -> None:
    answer = api.client.get("/")
    policy = policy_of(answer.headers["content-security-policy"])
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    markup = r"innerHTML|insertAdjacent|document\.write|eval\(|localStorage|\son\w+=| style="
    assert not re.search(markup, answer.text)
    assert len(answer.text.splitlines()) <= 300


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("service") / "home", "--auth", "token", cpu_slots=1)
    try:
        server.start().use_admin_token()
        yield server
    finally:
        server.stop()


def shown(server: Server, until: str, fragment: str = "", token: str = "") -> dict[str, Any]:
    """What the page shows: its script in node, with the service's answers."""
    script = Path(ROOT / "tests" / "support" / "page_dom.js")
    command = ["node", str(script), str(server.url), fragment, token]
    done = subprocess.run(command, env={**os.environ, "UNTIL": until}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    page: dict[str, Any] = json.loads(done.stdout)
    assert until in page["text"], page
    return page


JOB: dict[str, Any] = {
    "name": "curve",
    "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 3}},
    "world": {"ranks_per_node": 1, "device": "cpu"},
    "resources": {"cpus_per_rank": 1},
    "checkpoint": {"every_steps": 10},
    "trial": {"end_at": 60, "faults": [{"attempt": 1, "rank": 0, "step": 25, "kind": "kill-rank"}]},
}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs the page's script")
def test_jobs_page_with_a_token_shows_jobs_wait_reasons_and_loss_curve(guarded_server: Server) -> None:
    server = guarded_server
    job_id = server.submit(JOB)
    token = str(server.token)
    page = shown(server, "requires a token")
    assert page["requests"] == ["v1/jobs?limit=50"] and page["stored"] == {}
    assert "ratchet token create --role viewer" in page["text"] and "`ratchet" not in page["text"]
    page = shown(server, "check which token is sent", token=f"rt_wrong\u2028{token}")
    assert "requires a token" in page["text"] and page["stored"] == {"ratchet.token": f"rt_wrong{token}"}
    server.wait_phase(job_id, "SUCCEEDED")
    endless = server.submit(JOB | {"name": "endless", "task": JOB["task"] | {"args": {"epochs": 9999}}, "trial": None})
    waiting = server.submit(JOB | {"name": "second"})
    page = shown(server, "waits for CPU slots", token=token)
    assert page["stored"] == {"ratchet.token": token} and {"curve", "second"} <= {tag["text"] for tag in page["tags"]}
    assert f"#{waiting}" in {tag["attributes"].get("href") for tag in page["tags"]}
    for job in (waiting, endless):
        server.call("POST", f"/v1/jobs/{job}/cancel")
        server.wait_phase(job, "CANCELLED")

    page = shown(server, "Attempts", f"#{job_id}", token)
    assert "step 60" in page["text"] and "rank-killed" in page["text"] and page["trouble"] == ""
    assert f"ratchet attempts {job_id}" in page["text"]
    [line] = [tag for tag in page["tags"] if tag["attributes"].get("class") == "attempt"]
    assert line["text"].startswith("attempt 2 from step 20; the one before: rank-killed, ")
    [curve] = [tag["attributes"]["d"] for tag in page["tags"] if tag["tag"] == "path"]
    assert len(re.findall(r"[ML]", curve)) == 60 and curve.count("M") == 1
    assert {tag["attributes"]["value"] for tag in page["tags"] if tag["tag"] == "option"} >= {"loss", "lr"}
