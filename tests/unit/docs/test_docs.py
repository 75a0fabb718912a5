"""The documentation against the code: pages that are made from models are current, lists are complete, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ratchet_client.cli.shared.exit_codes import MEANINGS
from ratchet_contract import env_vars
from ratchet_contract.paths import MANIFEST_NAME, PINNED_NAME, HomePaths, rank_file_name
from ratchet_contract.phases import TRANSITIONS, Cause, Reason
from ratchet_contract.service_options import COMMANDS
from ratchet_service.api import problem_json
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from ratchet_service.db import migrate
from ratchet_service.db.engine import Database, sqlite_url
from ratchet_service.observability.metrics import Instruments
from tests.support import error_codes
from tests.support.api import FakeSubmission
from tests.support.docs import PAGES as USER_PAGES
from tests.support.docs import anchors, load_page_generator
from tests.support.postgres import URL_VARIABLE

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "hooks" / "README.md"])
API, TROUBLE, MONITORING = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("api", "troubleshooting", "monitoring")
)
_ELSEWHERE = {"lease-lost", "launcher-error"}  # inside the reconciler, never an answer


@pytest.mark.parametrize("page", ["spec", "python"])
def test_generated_page_is_current(page: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").read_text() == load_page_generator(page).page(), (
        f"run: python docs/make_{page}.py"
    )


def test_every_endpoint_stands_on_the_api_page(tmp_path: Path) -> None:
    named: set[str] = set()
    for row in re.findall(r"^\| (`(?:GET|POST|PUT|PATCH|DELETE) .*?) \|", API, re.MULTILINE):
        method, whole = "", ""
        for call in re.findall(r"`([^`]+)`", row):
            if " " in call:
                method, whole = call.split(" ")
            elif call != "?follow=true":
                whole = call if method == "GET" and call in ("/readyz", "/metrics") else whole.rsplit("/", 1)[0] + call
            named.add(f"{method} {whole}")
    paths = create_app(Settings(home=tmp_path), FakeSubmission()).openapi()["paths"]
    assert named == {f"{method.upper()} {path}" for path, item in paths.items() for method in item}


def test_every_code_of_an_error_stands_on_the_api_page() -> None:
    source = "".join(path.read_text() for path in (ROOT / "service").rglob("*.py"))
    whole = re.sub(r"(?:FieldProblem|Warning_)\([^)]*\)", "", source)  # what is said of a field is another thing
    codes = set(re.findall(r'\bcode="([a-z-]+)"', whole)) - _ELSEWHERE | set(problem_json._BY_CODE)
    codes |= {step.code for row in TRANSITIONS.values() for step in row.values() if step.code}
    assert sorted(code for code in codes if f"`{code}`" not in API) == []


def test_exit_codes_are_documented_as_they_are() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    assert [f"| {code.value} | {meaning} |" for code, meaning in MEANINGS.items()] == re.findall(
        r"^\| \d+ \|.*$", text, re.MULTILINE
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_and_anchors_resolve(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", page.read_text())):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link or (target.exists() and (not anchor or anchor in anchors(target))):
            continue
        broken.append(link)
    assert broken == []


def headings() -> set[str]:
    return set(re.findall(r"^### `([a-z-]+)`$", TROUBLE, re.MULTILINE))


def test_every_cause_and_wait_reason_has_a_section() -> None:
    assert headings() == {*Reason, *Cause}


@pytest.mark.parametrize("kind", ["field_codes", "attempt_codes"])
def test_every_user_facing_code_is_documented(kind: str) -> None:
    codes = getattr(error_codes, kind)()
    assert len(codes) > 10 and sorted(code for code in codes if f"`{code}`" not in TROUBLE + API) == []


def test_documented_metrics_match_exported_metrics(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path / "ratchet.db"))
    migrate.upgrade(database)
    instruments = Instruments()
    instruments.observe_request("GET", "/readyz", 200, 0.01)
    told = instruments.render(database).decode()
    database.dispose()
    names = {name for name in re.findall(r"^# TYPE (\w+) ", told, re.MULTILINE) if not name.endswith("_created")}
    assert set(re.findall(r"^\| `(ratchet_\w+)` \|", MONITORING, re.MULTILINE)) == names


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_documented_variables_and_run_directory_paths_exist(page: Path) -> None:
    known = {value for value in vars(env_vars).values() if isinstance(value, str)}
    named = set(re.findall(r"\bRATCHET_[A-Z_]+\b", page.read_text()))
    assert sorted(name for name in named - known if not name.startswith(("RATCHET_TEST_", "RATCHET_DB_"))) == []
    parts = {_numberless(part) for path in _run_directory() for part in path.parts}
    paths = re.findall(r"\.ratchet/([\w./-]+)", page.read_text())
    unknown = [path for path in paths for part in path.strip("/").split("/") if _numberless(part) not in parts]
    assert unknown == []


def test_every_option_of_the_service_stands_on_a_page_with_its_variable() -> None:
    options = {option.flag: option.variable for command in COMMANDS.values() for option in command.options}
    texts = [page.read_text() for page in USER_PAGES]
    missing = [
        flag
        for flag, variable in options.items()
        if not any(re.search(rf"{flag}(?![\w-])", text) and (variable or "") in text for text in texts)
    ]
    assert len(options) > 20 and missing == []


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _run_directory() -> list[Path]:
    """One path of everything that lies below a run directory."""
    homes = HomePaths(Path())
    job = homes.job("JOB")
    attempt = job.attempt(1)
    per_rank = [attempt.log(0), attempt.counter(0), attempt.spool(0), attempt.rank_result(0)]
    checkpoint = job.checkpoint(1, 1)
    files = [checkpoint / rank_file_name(0, 1), checkpoint / MANIFEST_NAME, checkpoint / PINNED_NAME]
    properties = [
        getattr(thing, name)
        for thing in (homes, job, attempt)
        for name in dir(type(thing))
        if isinstance(getattr(type(thing), name), property)
    ]
    return [*(p for p in properties if isinstance(p, Path)), *per_rank, *files, attempt.node(1).root]


def test_contributing_page_lists_every_test_variable() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    read = {name for text in texts for name in re.findall(r'environ(?:\.get\(|\[)"(RATCHET_TEST_\w+)"', text)}
    shown = set(re.findall(r"`(RATCHET_TEST_\w+)`", page)) | {
        "RATCHET_TEST_SCHEDULES" + end for end in re.findall(r"`(_[A-Z]+)`", page)
    }
    assert len(read) > 10 and read | {URL_VARIABLE} == shown


@pytest.mark.parametrize("package", sorted(path.parent.name for path in ROOT.glob("[a-z]*/ratchet_*/py.typed")))
def test_architecture_tree_lists_every_subpackage(package: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tree = re.search(rf"^\w+/{package}/.*?(?=^\w+/|^```)", text, re.MULTILINE | re.DOTALL)
    assert tree is not None
    (folder,) = ROOT.glob(f"[a-z]*/{package}")
    rooms = {path.parent.name for path in folder.rglob("*/__init__.py")}
    assert sorted(room for room in rooms if f"{room}/" not in tree[0]) == []
