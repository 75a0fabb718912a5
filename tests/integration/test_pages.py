"""Pages for a browser: what they load, which is all theirs, and what a Content-Security-Policy lets them do."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import pytest

from tests.support.api import Api
from tests.support.team import Team, guarded, team

__all__ = ["guarded", "team"]
KINDS = {"js": "text/javascript", "css": "text/css"}


def policy_of(text: str) -> dict[str, str]:
    return dict(part.strip().partition(" ")[::2] for part in text.split(";"))


@pytest.mark.parametrize("page", ["/docs"])
def test_a_page_loads_nothing_from_elsewhere(api: Api, page: str) -> None:
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


def test_the_description_of_the_api_is_shown_by_files_of_the_installation(api: Api) -> None:
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


def test_with_tokens_the_description_can_be_read_without_one_and_takes_one(team: Team) -> None:
    assert [team.nobody.get(path).status_code for path in ("/docs", "/docs/swagger-ui.css", "/openapi.json")] == [
        200
    ] * 3
    assert team.nobody.get("/v1/jobs").status_code == 401
    document = team.nobody.get("/openapi.json").json()
    scheme = document["components"]["securitySchemes"]["token"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer"), "what *Authorize* asks for"
