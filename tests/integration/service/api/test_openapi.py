"""The public surface is frozen: ``openapi.json`` beside this file is what the API says of itself.

After a wanted change, record it again and read the difference:
RATCHET_RECORD=1 pytest tests/integration/service/api/test_openapi.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ratchet_contract.errors import Problem
from ratchet_contract.spec.parse import load_spec_text, parse_spec
from ratchet_service.api import openapi
from ratchet_service.app import create_app
from ratchet_service.config.settings import Settings
from tests.support.api import FakeSubmission

SNAPSHOT = Path(__file__).with_name("openapi.json")


def document(tmp_path: Path) -> dict[str, Any]:
    return create_app(Settings(home=tmp_path), FakeSubmission()).openapi()


def test_openapi_document_equals_the_recorded_snapshot(tmp_path: Path) -> None:
    text = json.dumps(document(tmp_path), indent=1, sort_keys=True) + "\n"
    if os.environ.get("RATCHET_RECORD"):
        SNAPSHOT.write_text(text)
    assert SNAPSHOT.read_text() == text, "the API changed: see this file's docstring"


def test_openapi_schema_references_all_resolve(tmp_path: Path) -> None:
    found = document(tmp_path)
    schemas = found["components"]["schemas"]
    references = [part.split('"')[0] for part in json.dumps(found).split("#/components/schemas/")[1:]]
    assert references
    assert set(references) <= set(schemas)


def test_openapi_operations_describe_problems_and_request_bodies(tmp_path: Path) -> None:
    for path, item in document(tmp_path)["paths"].items():
        for method, operation in item.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            problems = operation["responses"]["4XX"]["content"]
            assert list(problems) == ["application/problem+json"], where
            assert ("requestBody" in operation) == (method in ("post", "put", "patch")), where
            keys = {p["name"] for p in operation.get("parameters", [])}
            assert ("Idempotency-Key" in keys) == (method == "post" and not path.endswith("/reports")), where


def test_openapi_schemas_have_no_property_named_epoch(tmp_path: Path) -> None:
    """``epoch`` is a pass over the data, and nothing else."""
    schemas: dict[str, Any] = document(tmp_path)["components"]["schemas"]
    assert [name for name, schema in schemas.items() if "epoch" in schema.get("properties", {})] == []


def test_openapi_examples_are_valid() -> None:
    by_json = parse_spec(openapi.SPEC)
    assert by_json == parse_spec(load_spec_text(openapi.SPEC_YAML))
    Problem.model_validate(openapi.PROBLEM)


def test_app_serves_the_openapi_document_and_docs_page(api: Any) -> None:
    assert api.client.get("/openapi.json").json()["info"]["title"] == "Ratchet"
    assert api.client.get("/docs").status_code == 200 and api.client.get("/redoc").status_code == 404
