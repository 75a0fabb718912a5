"""Examples for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Final

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
