"""The documentation against the code: pages that are made from models are current, lists are complete, links lead somewhere."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from ratchet_client.cli.exits import MEANINGS
from ratchet_contract.phases import TRANSITIONS
from ratchet_service import problems
from ratchet_service.app import create_app
from ratchet_service.settings import Settings
from tests.support.api import FakePorts

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
API = (ROOT / "docs" / "api.md").read_text()
_ELSEWHERE = {"lease-lost", "launcher-error"}  # inside the reconciler, never an answer


def make_spec() -> Any:
    found = spec_from_file_location("make_spec", ROOT / "docs" / "make_spec.py")
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_page_of_the_job_spec_is_current() -> None:
    assert (ROOT / "docs" / "spec.md").read_text() == make_spec().page(), "run: python docs/make_spec.py"


def test_every_endpoint_stands_on_the_api_page(tmp_path: Path) -> None:
    named: set[str] = set()
    for row in re.findall(r"^\| (`(?:GET|POST|PATCH|DELETE) .*?) \|", API, re.MULTILINE):
        method, whole = "", ""
        for call in re.findall(r"`([^`]+)`", row):
            if " " in call:
                method, whole = call.split(" ")
            elif call != "?follow=true":
                whole = call if method == "GET" and call in ("/readyz", "/metrics") else whole.rsplit("/", 1)[0] + call
            named.add(f"{method} {whole}")
    paths = create_app(Settings(home=tmp_path), FakePorts()).openapi()["paths"]
    assert named == {f"{method.upper()} {path}" for path, item in paths.items() for method in item}


def test_every_code_of_an_error_stands_on_the_api_page() -> None:
    source = "".join(path.read_text() for path in (ROOT / "service").rglob("*.py"))
    whole = re.sub(r"FieldProblem\([^)]*\)", "", source)  # a field's code is another thing
    codes = set(re.findall(r'\bcode="([a-z-]+)"', whole)) - _ELSEWHERE | set(problems._BY_CODE)
    codes |= {step.code for row in TRANSITIONS.values() for step in row.values() if step.code}
    assert sorted(code for code in codes if f"`{code}`" not in API) == []


def test_exit_codes_are_documented_as_they_are() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    assert [f"| {code.value} | {meaning} |" for code, meaning in MEANINGS.items()] == re.findall(
        r"^\| \d+ \|.*$", text, re.MULTILINE
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("package", sorted(path.parent.name for path in ROOT.glob("[a-z]*/ratchet_*/py.typed")))
def test_every_module_has_its_place_in_the_architecture(package: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = re.search(rf"^### `{package}`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    named = set(re.findall(r"`([a-z_/]+)`", section[1]))
    (folder,) = ROOT.glob(f"[a-z]*/{package}")
    here = {path.stem for path in folder.glob("*.py")} | {f"{path.name}/" for path in folder.iterdir() if path.is_dir()}
    assert sorted(here - {"__init__", "__main__", "__pycache__/"} - named) == []
