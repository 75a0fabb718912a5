"""Shell completion. Jobs, checkpoints and hooks are read from the running service with a short timeout; without a response none
is offered.

Heavy modules are imported only when the service is queried: a Tab must cause no noticeable delay.
"""

from __future__ import annotations

from typing import Any

import typer

from ratchet_contract.paths import is_job_id
from ratchet_contract.phases import JobPhase

_SECONDS = 1.0
_MOST = 100
Choices = list[tuple[str, str]]
"""Values with their descriptions (which zsh and fish show)."""


def _items(ctx: typer.Context, path: str, **params: str | int) -> list[dict[str, Any]]:
    """Return the first page of the list at the API path ``path``; empty after any error. ``params``: query parameters."""
    given = ctx.find_root().params
    try:
        from ratchet_client.http.transport import Transport

        transport = Transport(given.get("server"), given.get("home"), timeout=_SECONDS, retry_for=0.0)
        try:
            return list(transport.request("GET", path, params=params).json()["items"])
        finally:
            transport.close()
    except Exception:  # any message would appear in the middle of the command being typed
        return []


def _matching(choices: Choices, incomplete: str) -> Choices:
    """Return the choices whose value begins with ``incomplete``, the text typed so far."""
    return [choice for choice in choices if choice[0].startswith(incomplete)]


def jobs(ctx: typer.Context, incomplete: str) -> Choices:
    """Return the completions for a job, from the newest jobs: unambiguous names, then ids."""
    found = _items(ctx, "/v1/jobs", limit=_MOST)
    ids = [(job["id"], f"{job['name']}, {job['phase']}") for job in found]
    names = dict.fromkeys(job["name"] for job in found)
    meant = [one for name in names for one in _selected_job([job for job in found if job["name"] == name])]
    return _matching([*((job["name"], job["phase"]) for job in meant), *ids], incomplete)


def _selected_job(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a list with the job that a name shared by all ``jobs`` refers to; empty if the name is ambiguous."""
    left = jobs if len(jobs) == 1 else [job for job in jobs if not JobPhase(job["phase"]).terminal]
    return left if len(left) == 1 else []


def names(ctx: typer.Context, incomplete: str) -> Choices:
    """Return the completions for a job's name, from the newest 100 jobs."""
    found = {job["name"] for job in _items(ctx, "/v1/jobs", limit=_MOST)}
    return _matching([(name, "") for name in sorted(found)], incomplete)


def checkpoints(ctx: typer.Context, incomplete: str) -> Choices:
    """Return the completions for a checkpoint of the job on the command line; empty if the job is unknown or ambiguous."""
    job = str(ctx.params.get("job") or "")
    if not is_job_id(job):
        found = _selected_job(_items(ctx, "/v1/jobs", name=job, limit=_MOST)) if job else []
        if not found:
            return []
        job = found[0]["id"]
    rows = _items(ctx, f"/v1/jobs/{job}/checkpoints", limit=_MOST)
    return _matching([(row["id"], f"step {row['step']}, {row['state']}") for row in rows], incomplete)


def hooks(ctx: typer.Context, incomplete: str) -> Choices:
    return _matching([(hook["name"], hook["title"]) for hook in _items(ctx, "/v1/hooks")], incomplete)


def phases(ctx: typer.Context, incomplete: str) -> Choices:
    return _matching([(phase.value, "") for phase in JobPhase], incomplete.upper())


def sorts(ctx: typer.Context, incomplete: str) -> Choices:
    keys = ("created", "name", "priority")
    return _matching([(sign + key, "") for key in keys for sign in ("", "-")], incomplete)
