"""Routes for the communication hooks, by name, from the registry."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import TypeAdapter

from ratchet_contract.api.roles import Scope
from ratchet_contract.api.views import HookInfo, Page
from ratchet_contract.errors import NotFound
from ratchet_contract.spec.parse import suggestion
from ratchet_hooks.specs.hook_specs import WRAPPERS, canonical_hook_name
from ratchet_hooks.specs.registry import HOOKS, HookEntry
from ratchet_service.api.authentication import needs

router = APIRouter(tags=["hooks"])


@router.get("/v1/hooks", dependencies=[needs(Scope.JOBS_READ)], summary="List hooks")
def list_hooks() -> Page[HookInfo]:
    """All hooks, with their parameters as a JSON schema, back ends and warnings. Hooks that are named but not available yet are
    included."""
    return Page[HookInfo](items=[_info(entry) for entry in HOOKS.values()])


@router.get("/v1/hooks/{name}", dependencies=[needs(Scope.JOBS_READ)], summary="Read a hook")
def get_hook_info(name: str) -> HookInfo:
    """One hook, by its name, with or without `_hook`."""
    entry = HOOKS.get(canonical_hook_name(name))
    if entry is None:
        raise NotFound(f"no hook is named {name!r}{suggestion(name, HOOKS)}", code="hook-not-found")
    return _info(entry)


def _info(entry: HookEntry) -> HookInfo:
    """Return the API's view of a hook's registry entry."""
    return HookInfo(
        name=entry.name,
        title=entry.title,
        available=entry.available,
        stateful=entry.stateful,
        replicas=entry.replicas,
        backends=list(entry.backends),
        wrappers=list(WRAPPERS) if entry.wrappers else [],
        parameters=TypeAdapter(entry.spec).json_schema(),
        warnings=list(entry.warnings),
    )
