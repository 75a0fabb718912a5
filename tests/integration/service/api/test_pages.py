"""Pages for a browser: what they load, which is all theirs, and what a Content-Security-Policy lets them do."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urljoin

import pytest

from ratchet_service.api.routes import pages
from tests.support.api import Api
from tests.support.docs import ROOT
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
    assert policy["default-src"] in ("'self'", "'none'") and policy["frame-ancestors"] == "'none'"
    assert not re.search(r"https?:|\*|unsafe-eval", answer.headers["content-security-policy"])
    assert "'unsafe-inline'" not in policy.get("script-src", "")
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


def test_index_runs_no_inline_script_and_its_files_are_there_compressed_and_tagged(api: Api) -> None:
    page = api.client.get("/")
    policy = policy_of(page.headers["content-security-policy"])
    assert policy["default-src"] == "'self'" and "script-src" not in policy
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=| style=", page.text)
    loaded = re.findall(r'(?:src|href)="(web/[^"]*)"', page.text)
    assert {"web/main.js", "web/style.css", "web/icon.svg"} == set(loaded)
    for name in loaded:
        answer = api.client.get(f"/{name}", headers={"Accept-Encoding": "gzip"})
        assert answer.headers["content-encoding"] == "gzip" and answer.headers["vary"] == "Accept-Encoding"
        assert answer.text == api.client.get(f"/{name}", headers={"Accept-Encoding": "identity"}).text
        etag = answer.headers["etag"]
        for known in (etag, f'"a", {etag.removeprefix("W/")}', "*"):
            again = api.client.get(f"/{name}", headers={"If-None-Match": known})
            assert (again.status_code, again.content) == (304, b"")
        assert api.client.get(f"/{name}", headers={"If-None-Match": etag.replace('"', '"a', 1)}).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "../app.py",
        "..%2Fapp.py",
        "vendor",
        "vendor/lock.json",
        "app/main.js",
        "docs.js",
        "nothing.js",
        "%00.js",
        "a" * 300 + ".js",
    ],
)
def test_only_files_of_the_pages_are_served(api: Api, name: str) -> None:
    answer = api.client.get(f"/web/{name}")
    assert answer.status_code == 404 and answer.json()["code"] in ("file-not-found", "no-such-route")


def test_vendored_files_are_those_of_the_lock_file_which_names_no_registry() -> None:
    folder = ROOT / "service" / "ratchet_service" / "web" / "vendor"
    text = (folder / "lock.json").read_text()
    assert "://" not in text
    lock = json.loads(text)
    assert lock.keys() == {path.name for path in folder.iterdir() if path.suffix != ".ts"} - {"lock.json"}
    for name, entry in lock.items():
        digest = base64.b64encode(hashlib.sha384((folder / name).read_bytes()).digest()).decode()
        assert entry["integrity"] == f"sha384-{digest}" and entry["version"] and entry["licence"]


def test_report_page_is_served_without_a_token_and_says_itself_what_it_may_load(team: Team) -> None:
    answer = team.nobody.get("/web/report.html")
    assert answer.status_code == 200 and "default-src" not in answer.headers["content-security-policy"]
    assert "Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-" in answer.text
    assert '<script type="application/json" id="recorded"></script>' in answer.text


def test_changed_module_is_served_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: Api) -> None:
    web = tmp_path / "web"
    shutil.copytree(pages._WEB, web)
    monkeypatch.setattr(pages, "_WEB", web)
    before = api.client.get("/web/main.js")
    (web / "app" / "route.js").write_text((web / "app" / "route.js").read_text() + 'console.log("changed");\n')
    after = api.client.get("/web/main.js", headers={"If-None-Match": before.headers["etag"]})
    assert after.status_code == 200 and after.text.count('console.log("changed")') == 1


def test_pages_weigh_little(api: Api) -> None:
    sizes = {name: len(pages._files(())[name].packed) for name in pages._files(())}
    first = sum(sizes[name] for name in ("index.html", "icon.svg", "style.css", "main.js"))
    assert first <= 60_000 and first + sizes["job.js"] <= 120_000, sizes


def test_pages_are_served_from_an_installation_behind_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(ROOT / "service")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'current')!r})\n"
        "from ratchet_service.api.routes import pages\n"
        "assert 'current' in pages.__file__, pages.__file__\n"
        "print(pages.index().status_code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout == "200\n", done.stderr
