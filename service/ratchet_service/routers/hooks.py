"""Every communication hook by name, from the registry."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import TypeAdapter

from ratchet_contract.access import Scope
from ratchet_contract.api import HookInfo, Page
from ratchet_contract.errors import NotFound
from ratchet_contract.spec_parse import nearest
from ratchet_hooks.registry import HOOKS, HookEntry
from ratchet_hooks.specs import WRAPPERS, canonical_hook_name
from ratchet_service.access import needs

router = APIRouter(tags=["hooks"])


@router.get("/v1/hooks", dependencies=[needs(Scope.JOBS_READ)], summary="List hooks")
def list_hooks() -> Page[HookInfo]:
    """Parameters as JSON schema, back ends, warnings; also those that are named but not available yet."""
    return Page[HookInfo](items=[_info(entry) for entry in HOOKS.values()])


@router.get("/v1/hooks/{name}", dependencies=[needs(Scope.JOBS_READ)], summary="Read a hook")
def get_hook_info(name: str) -> HookInfo:
    """torch's name, with or without `_hook`."""
    entry = HOOKS.get(canonical_hook_name(name))
    if entry is None:
        raise NotFound(f"no hook is named {name!r}{nearest(name, HOOKS)}", code="hook-not-found")
    return _info(entry)


def _info(entry: HookEntry) -> HookInfo:
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
