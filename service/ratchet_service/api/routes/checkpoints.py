"""Routes for attempts and checkpoints of a job."""

from __future__ import annotations

import base64
import json
from contextlib import ExitStack
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from ratchet_contract.api.requests import PinRequest, PruneRequest
from ratchet_contract.api.roles import Scope
from ratchet_contract.api.views import (
    AttemptView,
    CheckpointDetail,
    CheckpointView,
    ComparisonView,
    Page,
    PruneResult,
    VerifyResult,
)
from ratchet_service.api import openapi
from ratchet_service.api.authentication import Caller, needs
from ratchet_service.api.dependencies import Cursor, JsonPost, Limit, ServiceDep, disconnect_event, reply
from ratchet_service.api.file_response import Sending, read_chunks
from ratchet_service.api.request_body import Nothing, parse
from ratchet_service.usecases import checkpoints, export, job_history
from ratchet_service.usecases import prune_checkpoints as prune

router = APIRouter(tags=["attempts and checkpoints"])
_FILE: Final[dict[str, Any]] = {"schema": {"type": "string", "format": "binary"}}
_EXPORTED: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The whole file, verified before its first byte is sent.",
        "content": dict.fromkeys(export.MEDIA_TYPES.values(), _FILE),
        "headers": {
            "Repr-Digest": {"description": "SHA-256 of the body (RFC 9530).", "schema": {"type": "string"}},
            "Ratchet-Notes": {
                "description": "JSON list of sentences: notes for the reader of the file.",
                "schema": {"type": "string"},
            },
        },
    },
    503: {"description": "`busy`: the service already runs its maximum number of exports; try again."},
    504: {"description": "`export-timeout`: it took longer than half an hour, and was ended."},
    507: {
        "description": "`disk-full`: no space next to the checkpoints for the exported files; no part of them is kept."
    },
}


@router.get("/v1/jobs/{job_id}/attempts", dependencies=[needs(Scope.JOBS_READ)], summary="List attempts")
def list_attempts(
    service: ServiceDep,
    job_id: str,
    exclude: Annotated[
        list[job_history.AttemptPart] | None,
        Query(
            description="`components`: resume reports without their components, which are as many as ranks times components; "
            "`nodes`: attempts without their nodes. Each is an empty list in the answer."
        ),
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[AttemptView]:
    """The job's attempts, newest first."""
    with service.database.read() as session:
        return job_history.list_attempts(session, job_id, limit, cursor, exclude or ())


@router.get("/v1/jobs/{job_id}/attempts/{number}", dependencies=[needs(Scope.JOBS_READ)], summary="Read an attempt")
def get_attempt(service: ServiceDep, job_id: str, number: str) -> AttemptView:
    """One attempt, with its outcome, cause, steps done and lost, and resume report."""
    with service.database.read() as session:
        view = job_history.get_attempt(session, job_id, number)
    return view.model_copy(
        update={"environment": job_history.attempt_environment(service.settings.paths, job_id, view.number)}
    )


@router.get("/v1/jobs/{job_id}/checkpoints", dependencies=[needs(Scope.JOBS_READ)], summary="List checkpoints")
def list_checkpoints(
    service: ServiceDep,
    job_id: str,
    state: Annotated[
        list[checkpoints.State] | None, Query(description="Default: stored ones, that is committed and quarantined.")
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[CheckpointView]:
    """The job's checkpoints, newest step first."""
    with service.database.read() as session:
        return checkpoints.list_checkpoints(session, job_id, tuple(state or ()), limit, cursor)


@router.get(
    "/v1/jobs/{job_id}/checkpoints/{checkpoint_id}", dependencies=[needs(Scope.JOBS_READ)], summary="Read a checkpoint"
)
def get_checkpoint(service: ServiceDep, job_id: str, checkpoint_id: str) -> CheckpointDetail:
    """One checkpoint, with its manifest. The manifest is null if the checkpoint is quarantined, or if the disk has no valid
    manifest of it."""
    with service.database.read() as session:
        return checkpoints.checkpoint_detail(session, job_id, checkpoint_id, service.settings.paths)


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
    """The checkpoint as files for other programs. safetensors and dcp: if the ranks' replicas differ, the model is their mean,
    and buffers are rank 0's. torch: each rank's file has the rank's own model. The files are made with the job's own
    interpreter if the job runs on the service's machine, else with the service's. The response begins when they are complete,
    which takes as long as reading and writing the files takes."""
    async with disconnect_event(request) as disconnect:
        exported = await run_in_threadpool(service.exporter.export, job_id, checkpoint_id, format, disconnect.is_set)
    headers = {
        "Content-Length": str(exported.size),
        "Repr-Digest": f"sha-256=:{base64.b64encode(exported.digest).decode()}:",
        "Ratchet-Notes": json.dumps(exported.notes),
    }
    seconds = service.settings.export_send_seconds
    held = ExitStack()
    held.enter_context(exported.file)
    return Sending(read_chunks(exported.file), held, seconds, headers=headers, media_type=export.MEDIA_TYPES[format])


@router.get(
    "/v1/jobs/{job_id}/compare/{with_job_id}",
    dependencies=[needs(Scope.JOBS_READ)],
    responses={503: {"description": "`busy`: the service already runs its maximum number of comparisons."}},
    summary="Compare two jobs' checkpoints, bit for bit",
)
def compare(
    service: ServiceDep,
    job_id: str,
    with_job_id: str,
    checkpoint: Annotated[str | None, Query(description="Checkpoint of the first job. Default: see above.")] = None,
    with_checkpoint: Annotated[str | None, Query(description="Checkpoint of the second job.")] = None,
) -> ComparisonView:
    """Compares every tensor and every rank's state of two checkpoints. By default these are the checkpoints of the first common
    step at which the jobs differ, or of the newest common step if they are identical at all of them. A common step is one at
    which both jobs have a checkpoint. If one checkpoint is named, it is compared with the other job's checkpoint of the same
    step. It takes as long as reading the files takes, unless the recorded digests are the same."""
    return service.comparer.compare(job_id, with_job_id, checkpoint, with_checkpoint)


@router.post(
    "/v1/jobs/{job_id}/checkpoints/{checkpoint_id}/verify",
    dependencies=[needs(Scope.CHECKPOINTS_WRITE, own_job=True)],
    response_model=VerifyResult,
    openapi_extra=openapi.NO_BODY,
    summary="Read every byte and compare with the digests",
)
def verify(service: ServiceDep, post: JsonPost, job_id: str, checkpoint_id: str) -> Response:
    """Reads the whole checkpoint, and takes as long as that. A damaged checkpoint is moved to the quarantine (`state:
    quarantined`), and no attempt starts from it. It stays in its place as long as an attempt may be using it, or a
    fork is still to start from it."""
    poster, data = post
    parse(Nothing, data)
    paths = service.settings.paths
    return poster.run(
        lambda: checkpoints.verify_bytes(service.database, job_id, checkpoint_id, paths),
        lambda session, found: reply(
            200, checkpoints.record_verification(session, job_id, checkpoint_id, found, paths)
        ),
    )


@router.post(
    "/v1/jobs/{job_id}/checkpoints/{checkpoint_id}/pin",
    dependencies=[needs(Scope.CHECKPOINTS_WRITE, own_job=True)],
    response_model=CheckpointView,
    openapi_extra=openapi.body(PinRequest, openapi.PIN),
    summary="Pin or unpin a checkpoint",
)
def pin(service: ServiceDep, post: JsonPost, job_id: str, checkpoint_id: str) -> Response:
    """Pins or unpins the checkpoint. Retention never deletes a pinned checkpoint; deleting the job with its checkpoints does."""
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
    openapi_extra=openapi.body(PruneRequest, openapi.PRUNE),
    summary="Delete checkpoints that no attempt will start from",
)
def prune_checkpoints(service: ServiceDep, post: JsonPost, caller: Caller, job_id: str) -> Response:
    """Deletes the branches that a resume from an earlier step left behind (`lineage: abandoned`), the checkpoints that
    attempts wrote after they had lost their lease, and the remains of saves. Pinned checkpoints stay, and so do files that a
    running attempt may be writing. With `quarantined`, all quarantined checkpoints are deleted, too, even pinned ones. With
    `dry_run`, nothing is deleted, and the response lists what would be deleted."""
    poster, data = post
    request = parse(PruneRequest, data)
    paths = service.settings.paths
    return poster.run(
        lambda: prune.prune(service.database, job_id, request, paths, caller), lambda _, pruned: reply(200, pruned)
    )
