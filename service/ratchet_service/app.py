"""``create_app``: the REST API over one database and one run directory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Final

from fastapi import Depends, FastAPI
from starlette.concurrency import run_in_threadpool

from ratchet_contract.version import RATCHET_VERSION
from ratchet_service import edge, migrate, openapi
from ratchet_service.access import Gate
from ratchet_service.database import Database
from ratchet_service.health import Health
from ratchet_service.http import Service, refuse_unknown_parameters
from ratchet_service.idempotency import Idempotency
from ratchet_service.instruments import Instruments
from ratchet_service.own_machine import OwnMachineOnly
from ratchet_service.ports import SubmissionPorts
from ratchet_service.routers import (
    actions,
    checkpoints,
    code,
    files,
    hooks,
    jobs,
    observe,
    operations,
    pages,
    queue,
    quotas,
    reports,
    tokens,
)
from ratchet_service.settings import Settings
from ratchet_service.turns import Turns
from ratchet_service.usecases.comparison import Comparer
from ratchet_service.usecases.export import Exporter
from ratchet_service.usecases.files import Files
from ratchet_service.usecases.upload import Uploads

_COMPARISONS: Final = 2  # of checkpoints at one time: each reads and hashes whole files
DESCRIPTION = """\
Checkpoint-aware training: DDP jobs that may be killed at any instant and go on bit for bit, hook state included.

Errors are `application/problem+json` (RFC 9457) with a stable `code`; `errors` point into the body (JSON pointer), or at
`/query/<name>`. Times are UTC. Cursors are opaque. `Idempotency-Key` on POST gives the first answer again for 24 hours.
"""


def create_app(
    settings: Settings,
    ports: SubmissionPorts,
    database: Database | None = None,
    health: Health | None = None,
    instruments: Instruments | None = None,
) -> FastAPI:
    """The app. Its lifespan migrates the database before the first request.

    ``database``: an open one to share, which the caller migrates and disposes of; default: the settings' own. ``health``: what
    the process that serves it says of itself; ``instruments``: shared with its reconciler, and listening already.
    """
    own = Database(settings.url) if database is None else None
    shared = database or own
    assert shared is not None
    counts = instruments or Instruments()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        settings.paths.jobs.mkdir(parents=True, exist_ok=True)
        if own is not None:
            await run_in_threadpool(migrate.upgrade, own)
        with counts.listening(shared) if instruments is None else nullcontext():
            yield
        if own is not None:
            own.dispose()

    app = FastAPI(
        title="Ratchet",
        version=RATCHET_VERSION,
        summary="Checkpoint-aware training service",
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load scripts from elsewhere: see routers/pages
        redoc_url=None,
        responses=openapi.PROBLEMS,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    idempotency = Idempotency(shared, settings.idempotency_seconds, settings.claim_seconds)
    turns = Turns(settings.exports, "making other exports")
    exporter = Exporter(shared, settings.paths, turns, settings.export_seconds, ports.trains_here, settings.confined)
    app.state.service = Service(
        settings,
        shared,
        ports,
        idempotency,
        exporter,
        Comparer(shared, settings.paths, Turns(_COMPARISONS, "comparing other checkpoints")),
        Files(shared, settings.paths, Turns(settings.file_transfers, "sending other files")),
        Uploads(settings.paths),
        Gate(settings, shared),
        health or Health(),
    )
    app.state.instruments = counts
    if not settings.tokens:
        app.add_middleware(OwnMachineOnly)
    edge.install(app, counts)  # outermost
    app.state.routes = []
    for module in (
        jobs,
        actions,
        checkpoints,
        observe,
        files,
        hooks,
        reports,
        code,
        tokens,
        quotas,
        queue,
        operations,
        pages,
    ):
        app.include_router(module.router, dependencies=[Depends(refuse_unknown_parameters)])
        app.state.routes += module.router.routes
    app.openapi = lambda: openapi.describe(app)  # type: ignore[method-assign]
    return app
