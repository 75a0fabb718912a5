"""The OpenAPI description and examples. Routes read bodies themselves (size, syntax, YAML), so this module adds the schemas."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ratchet_contract.api.quotas import QuotaRequest
from ratchet_contract.api.requests import ForkRequest, PatchRequest, PinRequest, PruneRequest, ResumeRequest
from ratchet_contract.api.tokens import TokenRequest
from ratchet_contract.api.webhooks import WebhookChange, WebhookRequest
from ratchet_contract.errors import Problem
from ratchet_contract.protocol.messages import AgentReport
from ratchet_contract.spec.job import JobSpec
from ratchet_service.api import problem_json
from ratchet_service.api.authentication import guard_of

SPEC: Final[dict[str, Any]] = {
    "name": "digits-powersgd",
    "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 20}},
    "world": {"nodes": 1, "ranks_per_node": 2, "device": "auto"},
    "hook": {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 10},
    "checkpoint": {"every_steps": 50, "keep_last": 3},
    "labels": {"team": "vision"},
}
SPEC_YAML: Final = """\
name: digits-powersgd
task: {entrypoint: "ratchet_worker.tasks.digits:DigitsTask", args: {epochs: 20}}
world: {nodes: 1, ranks_per_node: 2, device: auto}
hook: {name: powerSGD, matrix_approximation_rank: 2, start_powerSGD_iter: 10}
checkpoint: {every_steps: 50, keep_last: 3}
labels: {team: vision}
"""
RESUME: Final[dict[str, Any]] = {"from_step": 1200, "world": {"ranks_per_node": 4}, "on_hook_mismatch": "redistribute"}
FORK: Final[dict[str, Any]] = {
    "checkpoint_id": "step-000000001200.a0007",
    "name": "digits-longer",
    "spec": {"task": {"args": {"epochs": 40}}},
}
PATCH: Final[dict[str, Any]] = {"labels": {"team": "speech", "trial": None}, "priority": 10}
PIN: Final[dict[str, Any]] = {"pinned": True}
PRUNE: Final[dict[str, Any]] = {"dry_run": True}
QUOTA: Final[dict[str, Any]] = {"queued": 100, "jobs": 4, "ranks": 16, "gpus": 8}
TOKEN: Final[dict[str, Any]] = {"name": "laptop", "scopes": ["jobs:read", "jobs:write"], "expires_days": 30}
WEBHOOK: Final[dict[str, Any]] = {
    "url": "https://hooks.example/ratchet",
    "types": ["job.failed"],
    "label": "team=vision",
}
WEBHOOK_CHANGE: Final[dict[str, Any]] = {"enabled": True}
PROBLEM: Final[dict[str, Any]] = {
    "type": "urn:ratchet:problem:invalid-spec",
    "title": "Invalid request",
    "status": 422,
    "detail": "/hook/name: no hook is named 'powerSDG'; did you mean 'powerSGD'?",
    "code": "invalid-spec",
    "instance": "/v1/jobs",
    "errors": [
        {
            "pointer": "/hook/name",
            "code": "unknown-hook",
            "detail": "no hook is named 'powerSDG'; did you mean 'powerSGD'?",
        }
    ],
}


BODIES: Final[tuple[type[BaseModel], ...]] = (
    JobSpec, ResumeRequest, ForkRequest, PatchRequest, PinRequest, PruneRequest, TokenRequest, QuotaRequest, WebhookRequest,
    WebhookChange, AgentReport, Problem,
)  # fmt: skip
_REF: Final = "#/components/schemas/{model}"
PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"description": "What is wrong with the request, with a stable `code`."},
    "5XX": {"description": "An error of the service. Never stored for an Idempotency-Key."},
}


def body(model: type[BaseModel], example: Any, *, required: bool = False, yaml: str | None = None) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that reads its body itself. ``yaml``: an example; None: YAML is not accepted."""
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
        "description": "An API token with the named scope; required unless the service logs at its start that no token is "
        "needed.",
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
    "description": "The same key with the same body returns the first response again, for 24 hours, client errors included.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}
IF_NONE_MATCH: Final[dict[str, Any]] = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "description": "ETags of earlier responses; 304 without a body if the response still has one of them.",
    "schema": {"type": "string"},
}
IF_MATCH: Final = "The job's ETag from an earlier response; 412 if the job has changed since."


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the app's OpenAPI document, which is cached in the app."""
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
                _complete_operation(path, method, operation)
        components_of_security = document["components"].setdefault("securitySchemes", {})
        components_of_security.update(SECURITY)
        for route in (route for route in app.state.routes if route.include_in_schema):
            guard = guard_of(route.dependant)
            for method in route.methods:
                document["paths"][route.path][method.lower()]["security"] = [] if guard is None else guard.security
        app.openapi_schema = document
    return app.openapi_schema


def _complete_operation(path: str, method: str, operation: dict[str, Any]) -> None:
    """Complete an operation of the document, in place: its error responses, the parameter Idempotency-Key of a POST other than a
    report, and what ``conditional_requests`` adds to a GET."""
    operation["responses"].pop("422", None)  # FastAPI's; ours is among the 4XX
    for status, response in operation["responses"].items():
        if status[0] in "45":
            schema = {"$ref": _REF.format(model="Problem")}
            response["content"] = {problem_json.MEDIA_TYPE: {"schema": schema}}
            if status == "4XX":
                response["content"][problem_json.MEDIA_TYPE]["example"] = PROBLEM
    if method == "post" and not path.endswith("/reports"):
        operation.setdefault("parameters", []).append(IDEMPOTENT)
    is_json = "application/json" in operation["responses"].get("200", {}).get("content", {})
    if (
        method == "get" and path.startswith("/v1/") and is_json and path != "/v1/jobs/{job_id}"
    ):  # with an ETag of its own
        operation.setdefault("parameters", []).append(IF_NONE_MATCH)
        operation["responses"]["304"] = {"description": "The client already has this response."}
