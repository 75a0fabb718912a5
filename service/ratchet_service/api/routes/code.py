"""Routes that transfer code: from clients to the service, and to agents of nodes that do not have it."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from ratchet_contract.api.roles import Scope
from ratchet_contract.code import tree
from ratchet_contract.code.archive import MEDIA_TYPE, write_archive
from ratchet_service.agent_reports.fencing import count_stale_requests
from ratchet_service.api.authentication import AGENTS, Caller, bearer_token, needs
from ratchet_service.api.dependencies import ServiceDep
from ratchet_service.usecases import code_transfer

router = APIRouter()
Digest = Annotated[str, Path(pattern=tree.DIGEST, description="Digest of the tree, hex.")]
_SENT: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "GNU tar without directories and extended headers: files and symbolic links within the tree.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}
_TAR: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The tree as a tar, always in the same bytes: files and links, sorted, without directories.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.get(
    "/v1/jobs/{job_id}/attempts/{number}/code/{digest}",
    dependencies=[AGENTS],
    response_class=StreamingResponse,
    responses=_TAR,
    tags=["agents"],
    summary="Fetch the job's code by digest",
)
def fetch_code(
    service: ServiceDep,
    job_id: str,
    number: str,
    digest: str,
    authorization: Annotated[str | None, Header(description="Bearer and the token of the attempt.")] = None,
) -> StreamingResponse:
    """The job's code, or the file of `start_from`, with this digest. 409 `stale-attempt`: the attempt is over."""
    attempt = code_transfer.parse_attempt_number(number)
    with (
        count_stale_requests(service.database, job_id, attempt, "a request for code"),
        service.database.read() as session,
    ):
        found = code_transfer.find_tree(
            session, service.settings.paths, job_id, number, digest, bearer_token(authorization)
        )
    return StreamingResponse(write_archive(found), media_type=MEDIA_TYPE)


@router.get(
    "/v1/code/{digest}",
    dependencies=[needs(Scope.CODE_WRITE)],
    status_code=204,
    response_class=Response,
    tags=["jobs"],
    summary="Check whether the service has a tree of code",
)
def look_for_code(service: ServiceDep, digest: Digest) -> Response:
    """204: the service has the code, and any caller's spec may name it as `code.digest` in the next ten minutes. 404
    `code-not-found`: the client must send it."""
    service.uploads.renew(digest)
    return Response(status_code=204)


@router.put(
    "/v1/code/{digest}",
    dependencies=[needs(Scope.CODE_WRITE)],
    status_code=201,
    response_class=Response,
    responses={200: {"description": "It already existed."}},
    openapi_extra=_SENT,
    tags=["jobs"],
    summary="Send a tree of code",
)
async def put_code(service: ServiceDep, caller: Caller, digest: Digest, request: Request) -> Response:
    """Stores the code. It is kept for ten minutes, and while a job uses it. `code-archive-invalid`: the archive is not the tree
    with the digest."""
    made = await service.uploads.receive(request, digest)
    if made:
        await run_in_threadpool(code_transfer.record_upload, service.database, digest, caller)
    return Response(status_code=201 if made else 200, headers={"Location": f"/v1/code/{digest}"})
