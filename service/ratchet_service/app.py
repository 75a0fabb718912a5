"""``create_app``: the REST API over one database and one run directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import cache
from typing import Final

from fastapi import APIRouter, Depends, FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute

from ratchet_contract.version import RATCHET_VERSION
from ratchet_service.agent_reports.control_watch import ControlWatch
from ratchet_service.api import middleware, openapi
from ratchet_service.api.authentication import Gate
from ratchet_service.api.code_upload import Uploads
from ratchet_service.api.conditional_requests import ConditionalRequests
from ratchet_service.api.dependencies import Service, refuse_unknown_parameters
from ratchet_service.api.idempotency import Idempotency
from ratchet_service.api.middleware import OwnMachineOnly
from ratchet_service.api.routes import (
    agent_reports,
    audit,
    checkpoints,
    code,
    files,
    hooks,
    job_actions,
    jobs,
    monitoring,
    pages,
    queue,
    tokens,
    webhooks,
)
from ratchet_service.api.routes import health as health_routes
from ratchet_service.config.settings import Settings
from ratchet_service.db import migrate
from ratchet_service.db.engine import Database
from ratchet_service.isolation.concurrency_limit import ConcurrencyLimit
from ratchet_service.observability.health import Health
from ratchet_service.observability.metrics import Instruments
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.usecases.compare import Comparer
from ratchet_service.usecases.export import Exporter
from ratchet_service.usecases.output_files import Files

_COMPARISONS: Final = 2  # concurrent comparisons of checkpoints: each reads and hashes whole files
_MODULES: Final = (
    jobs, job_actions, checkpoints, monitoring, files, hooks, agent_reports, code, tokens, audit, queue, webhooks, health_routes,
    pages,
)  # fmt: skip
DESCRIPTION = """\
Checkpoint-aware training: DDP jobs that may be killed at any instant and resume bit for bit, hook state included.

Errors are `application/problem+json` (RFC 9457) with a stable `code`; `errors` point into the body (JSON pointer), or at
`/query/<name>`. Times are UTC. Cursors are opaque. A POST with the same `Idempotency-Key` returns the first response again
for 24 hours.
"""


def create_app(
    settings: Settings,
    submission: LocalSubmission,
    database: Database | None = None,
    health: Health | None = None,
    instruments: Instruments | None = None,
) -> FastAPI:
    """Return the app: the REST API over one database and one run directory. ``database``: an open database, which the caller
    migrates and disposes of. If it is None, the app opens, migrates and disposes of the database that the settings name.
    ``instruments``: the metrics, if the caller has already entered their ``count_commits``; None: the app makes its own."""
    own = Database(settings.url) if database is None else None
    shared = database or own
    assert shared is not None
    shared_instruments, shared_health = instruments or Instruments(), health or Health()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Create the directory of jobs, and migrate the app's own database; after the last request, dispose of it."""
        settings.paths.jobs.mkdir(parents=True, exist_ok=True)
        if own is not None:
            await run_in_threadpool(migrate.upgrade, own)
        with shared_instruments.count_commits(shared) if instruments is None else nullcontext():
            yield
        if own is not None:
            own.dispose()

    app = FastAPI(
        title="Ratchet",
        version=RATCHET_VERSION,
        summary="Checkpoint-aware training service",
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load scripts from other hosts: see api.routes.pages
        redoc_url=None,
        responses=openapi.PROBLEMS,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    idempotency = Idempotency(shared, settings.idempotency_seconds, settings.claim_seconds)
    turns = ConcurrencyLimit(settings.max_exports, "making other exports")
    exporter = Exporter(
        shared, settings.paths, turns, settings.export_seconds, submission.trains_here, settings.sandbox
    )
    app.state.service = Service(
        settings,
        shared,
        submission,
        idempotency,
        exporter,
        Comparer(shared, settings.paths, ConcurrencyLimit(_COMPARISONS, "comparing other checkpoints")),
        Files(shared, settings.paths, ConcurrencyLimit(settings.max_file_transfers, "sending other files")),
        Uploads(settings.paths),
        Gate(settings, shared),
        shared_health,
        ControlWatch(shared, lambda: shared_health.stopping),
    )
    app.state.instruments = shared_instruments
    app.add_middleware(ConditionalRequests)
    if not settings.tokens_required:
        app.add_middleware(OwnMachineOnly)
    middleware.install(app, shared_instruments)  # outermost
    app.router.routes.extend(_routes())
    app.state.routes = [route for module in _MODULES for route in module.router.routes]
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]
    return app


@cache
def _routes() -> tuple[BaseRoute, ...]:
    """Return the routes of ``_MODULES``. All apps of this process share them: FastAPI takes 50 ms to prepare them, in the first
    request."""
    router = APIRouter(responses=openapi.PROBLEMS, generate_unique_id_function=lambda route: route.name)
    for module in _MODULES:
        router.include_router(module.router, dependencies=[Depends(refuse_unknown_parameters)])
    return tuple(router.routes)
