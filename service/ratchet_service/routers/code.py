"""Code on its way: from clients whose directories the service does not see, and to the agents of nodes that do not have it."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.responses import StreamingResponse

from ratchet_contract import code_tree
from ratchet_contract.access import Scope
from ratchet_contract.code_archive import MEDIA_TYPE, archive
from ratchet_service.access import AGENTS, bearer, needs
from ratchet_service.fencing import refusals
from ratchet_service.http import ServiceDep
from ratchet_service.usecases import code

router = APIRouter()
Digest = Annotated[str, Path(pattern=code_tree.DIGEST, description="Of the tree, hex.")]
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
    """The snapshot of `code`, or the file of `start_from`, whichever has the digest. 409 `stale-epoch`: the attempt is over."""
    epoch = code.number_of(number)
    with refusals(service.database, job_id, epoch, "a request for code"), service.database.read() as session:
        found = code.find(session, service.settings.paths, job_id, number, digest, bearer(authorization))
    return StreamingResponse(archive(found), media_type=MEDIA_TYPE)


@router.get(
    "/v1/code/{digest}",
    dependencies=[needs(Scope.CODE_WRITE)],
    status_code=204,
    response_class=Response,
    tags=["jobs"],
    summary="Ask whether the service has a tree of code",
)
def look_for_code(service: ServiceDep, digest: Digest) -> Response:
    """204: a spec may name it as `code.digest`, within ten minutes from now, whoever sent it. 404 `code-not-found`: send it."""
    service.uploads.look(digest)
    return Response(status_code=204)


@router.put(
    "/v1/code/{digest}",
    dependencies=[needs(Scope.CODE_WRITE)],
    status_code=201,
    response_class=Response,
    responses={200: {"description": "It was there already."}},
    openapi_extra=_SENT,
    tags=["jobs"],
    summary="Send a tree of code",
)
async def put_code(service: ServiceDep, digest: Digest, request: Request) -> Response:
    """Kept for ten minutes, and for as long as a job names it. `code-archive-invalid`: it is not the tree with the digest."""
    made = await service.uploads.take(request, digest)
    return Response(status_code=201 if made else 200, headers={"Location": f"/v1/code/{digest}"})
