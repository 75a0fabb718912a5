"""The OpenAPI description: bodies are read by hand (size, syntax, YAML), so their schemas are written in by hand too."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ratchet_contract.api_access import TokenRequest
from ratchet_contract.api_quotas import QuotaRequest
from ratchet_contract.api_requests import ForkRequest, PatchRequest, PinRequest, PruneRequest, ResumeRequest
from ratchet_contract.errors import Problem
from ratchet_contract.messages import AgentReport
from ratchet_contract.spec import JobSpec
from ratchet_service import examples, problems
from ratchet_service.access import guard_of

BODIES: Final[tuple[type[BaseModel], ...]] = (
    JobSpec, ResumeRequest, ForkRequest, PatchRequest, PinRequest, PruneRequest, TokenRequest, QuotaRequest, AgentReport,
    Problem,
)  # fmt: skip
_REF: Final = "#/components/schemas/{model}"
PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"description": "What is wrong with the request, with a stable `code`."},
    "5XX": {"description": "A fault of the service. Never kept for an Idempotency-Key."},
}


def body(model: type[BaseModel], example: Any, *, required: bool = False, yaml: str | None = None) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads ``model`` itself."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if example is not None:
        content["application/json"]["example"] = example
    if yaml is not None:
        content["application/yaml"] = {"schema": schema, "example": yaml}
    return {"requestBody": {"required": required, "content": content}}


SECURITY: Final[dict[str, Any]] = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API token with the scope that is named; needed unless the service says at its start that it is not.",
    },
    "attempt": {"type": "http", "scheme": "bearer", "description": "The token of the attempt, from its launch file."},
}
NO_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": False,
        "content": {"application/json": {"schema": {"type": "object", "maxProperties": 0}}},
    }
}
IDEMPOTENT: Final[dict[str, Any]] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key with the same body gives the first answer again, for 24 hours; errors of the client too.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}
IF_MATCH: Final = "The job's ETag as it was read; 412 when the job has changed since."


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, description=app.description, routes=app.routes
        )
        _, extra = models_json_schema([(model, "validation") for model in BODIES], ref_template=_REF)
        components = document.setdefault("components", {}).setdefault("schemas", {})
        for name, schema in extra["$defs"].items():
            components.setdefault(name, schema)
        for unused in ("HTTPValidationError", "ValidationError"):
            components.pop(unused, None)
        for path, item in document["paths"].items():
            for method, operation in item.items():
                _finish(path, method, operation)
        components_of_security = document["components"].setdefault("securitySchemes", {})
        components_of_security.update(SECURITY)
        for route in (route for route in app.state.routes if route.include_in_schema):
            guard = guard_of(route.dependant)
            for method in route.methods:
                document["paths"][route.path][method.lower()]["security"] = [] if guard is None else guard.security
        app.openapi_schema = document
    return app.openapi_schema


def _finish(path: str, method: str, operation: dict[str, Any]) -> None:
    operation["responses"].pop("422", None)  # FastAPI's own; ours is among the 4XX
    for status, response in operation["responses"].items():
        if status[0] in "45":
            schema = {"$ref": _REF.format(model="Problem")}
            response["content"] = {problems.MEDIA_TYPE: {"schema": schema}}
            if status == "4XX":
                response["content"][problems.MEDIA_TYPE]["example"] = examples.PROBLEM
    if method == "post" and not path.endswith("/reports"):
        operation.setdefault("parameters", []).append(IDEMPOTENT)
