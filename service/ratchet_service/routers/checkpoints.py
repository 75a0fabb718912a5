"""Attempts and checkpoints of a job."""

from __future__ import annotations

import base64
import json
from contextlib import ExitStack
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from ratchet_contract.access import Scope
from ratchet_contract.api import (
    AttemptView,
    CheckpointDetail,
    CheckpointView,
    ComparisonView,
    Page,
    PruneResult,
    VerifyResult,
)
from ratchet_contract.api_requests import PinRequest, PruneRequest
from ratchet_service import examples, openapi
from ratchet_service.access import needs
from ratchet_service.bodies import parse
from ratchet_service.http import Cursor, JsonPost, Limit, ServiceDep, disconnected, reply
from ratchet_service.routers.actions import Nothing
from ratchet_service.sending import Sending, chunks
from ratchet_service.usecases import attempts, checkpoints, export, prune

router = APIRouter(tags=["attempts and checkpoints"])
_FILE: Final[dict[str, Any]] = {"schema": {"type": "string", "format": "binary"}}
_EXPORTED: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The whole file, verified before its first byte is sent.",
        "content": dict.fromkeys(export.MEDIA_TYPES.values(), _FILE),
        "headers": {
            "Repr-Digest": {"description": "SHA-256 of the body (RFC 9530).", "schema": {"type": "string"}},
            "Ratchet-Notes": {
                "description": "JSON list of sentences: what a reader of the file must know.",
                "schema": {"type": "string"},
            },
        },
    },
    503: {"description": "`busy`: as many exports as the service makes at one time are being made; try again."},
    504: {"description": "`export-timeout`: it took longer than half an hour, and was ended."},
    507: {"description": "`disk-full`: no room for the files beside the checkpoints; nothing of them is left."},
}


@router.get("/v1/jobs/{job_id}/attempts", dependencies=[needs(Scope.JOBS_READ)], summary="List attempts")
def list_attempts(service: ServiceDep, job_id: str, limit: Limit = 50, cursor: Cursor = None) -> Page[AttemptView]:
    """Newest first."""
    with service.database.read() as session:
        return attempts.list_attempts(session, job_id, limit, cursor)


@router.get("/v1/jobs/{job_id}/attempts/{number}", dependencies=[needs(Scope.JOBS_READ)], summary="Read an attempt")
def get_attempt(service: ServiceDep, job_id: str, number: str) -> AttemptView:
    """With outcome, cause, steps done and lost, and the resume report."""
    with service.database.read() as session:
        view = attempts.get_attempt(session, job_id, number)
    return view.model_copy(update={"environment": attempts.environment(service.settings.paths, job_id, view.number)})


@router.get("/v1/jobs/{job_id}/checkpoints", dependencies=[needs(Scope.JOBS_READ)], summary="List checkpoints")
def list_checkpoints(
    service: ServiceDep,
    job_id: str,
    state: Annotated[
        list[checkpoints.State] | None, Query(description="Default: what is stored, committed and quarantined.")
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[CheckpointView]:
    """Newest step first."""
    with service.database.read() as session:
        return checkpoints.list_checkpoints(session, job_id, tuple(state or ()), limit, cursor)


@router.get(
    "/v1/jobs/{job_id}/checkpoints/{checkpoint_id}", dependencies=[needs(Scope.JOBS_READ)], summary="Read a checkpoint"
)
def get_checkpoint(service: ServiceDep, job_id: str, checkpoint_id: str) -> CheckpointDetail:
    """With its manifest, where the disk still has it."""
    with service.database.read() as session:
        return checkpoints.detail(session, job_id, checkpoint_id, service.settings.paths)


@router.get(
    "/v1/jobs/{job_id}/checkpoints/{checkpoint_id}/export",
    dependencies=[needs(Scope.JOBS_READ)],
    response_class=StreamingResponse,
    responses=_EXPORTED,
    summary="Read a checkpoint as files for other programs",
)
async def export_checkpoint(
    request: Request,
    service: ServiceDep,
    job_id: str,
    checkpoint_id: str,
    format: Annotated[
        export.Format,
        Query(
            description="safetensors: the model alone. torch: a tar of one file per rank with the rank's whole state, for "
            "`torch.load(weights_only=True)`. dcp: a tar of the files that `torch.distributed.checkpoint` reads, model and "
            "optimizer; they hold pickles."
        ),
    ] = "safetensors",
) -> Response:
    """Where the ranks' replicas differ the model is their mean; buffers are rank 0's. Made with the job's own interpreter, which
    takes as long as reading and writing the files takes."""
    async with disconnected(request) as gone:
        made = await run_in_threadpool(service.exporter.export, job_id, checkpoint_id, format, gone.is_set)
    headers = {
        "Content-Length": str(made.size),
        "Repr-Digest": f"sha-256=:{base64.b64encode(made.digest).decode()}:",
        "Ratchet-Notes": json.dumps(made.notes),
    }
    seconds = service.settings.export_send_seconds
    held = ExitStack()
    held.enter_context(made.file)
    return Sending(chunks(made.file), held, seconds, headers=headers, media_type=export.MEDIA_TYPES[format])


@router.get(
    "/v1/jobs/{job_id}/compare/{with_job_id}",
    dependencies=[needs(Scope.JOBS_READ)],
    responses={503: {"description": "`busy`: as many comparisons as the service makes at one time are being made."}},
    summary="Compare two jobs' checkpoints, bit for bit",
)
def compare(
    service: ServiceDep,
    job_id: str,
    with_job_id: str,
    checkpoint: Annotated[str | None, Query(description="Of the first job. Default: see above.")] = None,
    with_checkpoint: Annotated[str | None, Query(description="Of the second job.")] = None,
) -> ComparisonView:
    """Every tensor and every rank's state: at the first step at which they differ, of those that both have a checkpoint of; if
    they differ nowhere, at the newest. Takes as long as reading the files takes, unless the recorded digests are the same."""
    return service.comparer.compare(job_id, with_job_id, checkpoint, with_checkpoint)


@router.post(
    "/v1/jobs/{job_id}/checkpoints/{checkpoint_id}/verify",
    dependencies=[needs(Scope.CHECKPOINTS_WRITE, own_job=True)],
    response_model=VerifyResult,
    openapi_extra=openapi.NO_BODY,
    summary="Read every byte and compare with the digests",
)
def verify(service: ServiceDep, post: JsonPost, job_id: str, checkpoint_id: str) -> Response:
    """Takes as long as reading the files takes. What is found damaged is set aside (`state: quarantined`), and the job goes on
    from the one before it. While an attempt may be using it, it stays where it is until that has ended."""
    poster, data = post
    parse(Nothing, data)
    paths = service.settings.paths
    return poster.run(
        lambda: checkpoints.read_all_bytes(service.database, job_id, checkpoint_id, paths),
        lambda session, found: reply(
            200, checkpoints.record_verification(session, job_id, checkpoint_id, found, paths)
        ),
    )


@router.post(
    "/v1/jobs/{job_id}/checkpoints/{checkpoint_id}/pin",
    dependencies=[needs(Scope.CHECKPOINTS_WRITE, own_job=True)],
    response_model=CheckpointView,
    openapi_extra=openapi.body(PinRequest, examples.PIN),
    summary="Keep a checkpoint, or let it go",
)
def pin(service: ServiceDep, post: JsonPost, job_id: str, checkpoint_id: str) -> Response:
    """A pinned checkpoint is left alone by retention; deleting the job deletes it."""
    poster, data = post
    request = parse(PinRequest, data)
    paths = service.settings.paths
    return poster.run(
        lambda: None,
        lambda session, _: reply(200, checkpoints.pin(session, job_id, checkpoint_id, request.pinned, paths)),
    )


@router.post(
    "/v1/jobs/{job_id}/checkpoints/prune",
    dependencies=[needs(Scope.CHECKPOINTS_WRITE, own_job=True)],
    response_model=PruneResult,
    openapi_extra=openapi.body(PruneRequest, examples.PRUNE),
    summary="Remove what no attempt will start from",
)
def prune_checkpoints(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """Branches that a resume from an earlier step left behind (`lineage: abandoned`), checkpoints of attempts that had lost their
    lease, and remains of saves. What is pinned stays, and so does what an attempt that runs may be writing."""
    poster, data = post
    request = parse(PruneRequest, data)
    paths = service.settings.paths
    return poster.run(
        lambda: prune.prune(service.database, job_id, request, paths), lambda _, pruned: reply(200, pruned)
    )
