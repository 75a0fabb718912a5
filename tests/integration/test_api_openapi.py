"""The public surface is frozen: ``openapi.json`` beside this file is what the API says of itself.

After a wanted change, record it again and read the difference: RATCHET_RECORD=1 pytest tests/integration/test_api_openapi.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ratchet_contract.errors import Problem
from ratchet_contract.spec_parse import load_spec_text, parse_spec
from ratchet_service import examples
from ratchet_service.app import create_app
from ratchet_service.settings import Settings
from tests.support.api import FakePorts

SNAPSHOT = Path(__file__).with_name("openapi.json")


def document(tmp_path: Path) -> dict[str, Any]:
    return create_app(Settings(home=tmp_path), FakePorts()).openapi()


def test_the_description_is_the_recorded_one(tmp_path: Path) -> None:
    text = json.dumps(document(tmp_path), indent=1, sort_keys=True) + "\n"
    if os.environ.get("RATCHET_RECORD"):
        SNAPSHOT.write_text(text)
    assert SNAPSHOT.read_text() == text, "the API changed: see this file's docstring"


def test_every_reference_leads_somewhere(tmp_path: Path) -> None:
    found = document(tmp_path)
    schemas = found["components"]["schemas"]
    references = [part.split('"')[0] for part in json.dumps(found).split("#/components/schemas/")[1:]]
    assert references
    assert set(references) <= set(schemas)


def test_every_operation_describes_its_problems_and_its_body(tmp_path: Path) -> None:
    for path, item in document(tmp_path)["paths"].items():
        for method, operation in item.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            problems = operation["responses"]["4XX"]["content"]
            assert list(problems) == ["application/problem+json"], where
            assert ("requestBody" in operation) == (method in ("post", "put", "patch")), where
            keys = {p["name"] for p in operation.get("parameters", [])}
            assert ("Idempotency-Key" in keys) == (method == "post" and not path.endswith("/reports")), where


def test_an_attempt_is_called_an_attempt(tmp_path: Path) -> None:
    """Only what agents and services of several versions send each other has the older word, ``epoch``."""
    found = document(tmp_path)
    schemas: dict[str, Any] = found["components"]["schemas"]
    told = [op for path, item in found["paths"].items() if not path.endswith("/reports") for op in item.values()]
    shown, left = set(), _referred(told)
    while left:
        name = left.pop()
        shown.add(name)
        left |= _referred(schemas[name]) - shown
    assert {"JobView", "AttemptView", "BaseView", "EventView", "MetricPoint", "HookSampleView"} <= shown
    assert [name for name in shown if "epoch" in schemas[name].get("properties", {})] == []


def _referred(part: Any) -> set[str]:
    return {text.split('"')[0] for text in json.dumps(part).split("#/components/schemas/")[1:]}


def test_examples_are_valid() -> None:
    by_json = parse_spec(examples.SPEC)
    assert by_json == parse_spec(load_spec_text(examples.SPEC_YAML))
    Problem.model_validate(examples.PROBLEM)


def test_the_app_serves_its_description(api: Any) -> None:
    assert api.client.get("/openapi.json").json()["info"]["title"] == "Ratchet"
    assert api.client.get("/docs").status_code == 200 and api.client.get("/redoc").status_code == 404
