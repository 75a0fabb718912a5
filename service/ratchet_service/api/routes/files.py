"""Routes for the files in a job's working directory: a list, one file, a directory as a tar."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from ratchet_contract.api.roles import Scope
from ratchet_contract.api.views import FileView, Page
from ratchet_service.api import byte_range
from ratchet_service.api.authentication import needs
from ratchet_service.api.dependencies import ServiceDep
from ratchet_service.api.file_response import Sending

router = APIRouter(tags=["files"])
_BINARY: Final[dict[str, Any]] = {"schema": {"type": "string", "format": "binary"}}
_BUSY: Final[dict[str, Any]] = {"description": "`busy`: the service already sends its maximum number of files."}
_CONTENT: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The whole file, to be saved and never shown: `Content-Disposition: attachment`.",
        "content": {"application/octet-stream": _BINARY},
    },
    206: {
        "description": "The bytes of `Range`; `Content-Range` says which.",
        "content": {"application/octet-stream": _BINARY},
    },
    416: {"description": "`range-not-satisfiable`: the file has no such bytes."},
    503: _BUSY,
}
_ARCHIVE: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "A GNU tar of files and directories, named from the directory that holds `path`.",
        "content": {"application/x-tar": _BINARY},
        "headers": {
            "Ratchet-Entries": {
                "description": "Number of files and directories in it; fewer arrive if some were deleted meanwhile.",
                "schema": {"type": "integer"},
            },
            "Ratchet-Size": {"description": "Bytes of these files.", "schema": {"type": "integer"}},
            "Ratchet-Notes": {
                "description": "JSON list of sentences: which parts of the directory are not in it.",
                "schema": {"type": "string"},
            },
        },
    },
    413: {"description": "`archive-too-large`, `too-many-files`: fetch the directories in it one by one."},
    503: _BUSY,
}
_NO_SNIFFING: Final = {"X-Content-Type-Options": "nosniff"}
Below = Annotated[
    str, Query(max_length=4096, description="Below the working directory, like `runs/best`. Default: all of it.")
]
All = Annotated[bool, Query(alias="all", description="Include unchanged files of the job's code.")]


@router.get("/v1/jobs/{job_id}/files", dependencies=[needs(Scope.JOBS_READ)], summary="List a job's files")
def list_files(
    service: ServiceDep,
    response: Response,
    job_id: str,
    path: Below = "",
    recursive: Annotated[bool, Query(description="Include the content of its directories.")] = True,
    everything: All = False,
    limit: Annotated[int, Query(ge=1, le=1000, description="Items per page.")] = 100,
    cursor: Annotated[str | None, Query(max_length=16_384, description="`next_cursor` of the previous page.")] = None,
) -> Page[FileView]:
    """The files in the job's working directory, sorted by name, each directory before its content. Unchanged files of the job's
    code are left out by default. Symbolic links are listed and not followed. The list is also available for a
    job that was deleted without its outputs."""
    response.headers.update(_NO_SNIFFING)  # names are users' own text
    return service.files.page(
        job_id, path, recursive=recursive, include_unchanged=everything, limit=limit, cursor=cursor
    )


@router.get(
    "/v1/jobs/{job_id}/files/content",
    dependencies=[needs(Scope.JOBS_READ)],
    response_class=StreamingResponse,
    responses=_CONTENT,
    summary="Read one of a job's files",
)
def get_file(
    service: ServiceDep,
    job_id: str,
    path: Annotated[str, Query(max_length=4096, description="Below the working directory, like `runs/best.pt`.")],
    wanted: Annotated[
        str | None, Header(alias="Range", description="`bytes=0-1023`, `bytes=1024-`, `bytes=-1024`: one range.")
    ] = None,
    if_range: Annotated[
        str | None, Header(description="The `ETag` of the part before: the whole file if it has changed since.")
    ] = None,
) -> Response:
    """The file's content, or the bytes of `Range`. What is appended after the file was opened is not in the response."""
    content = service.files.content(job_id, path)
    try:
        part = byte_range.parse_range(wanted, content.size) if if_range in (None, content.etag) else None
    except BaseException:
        content.resources.close()
        raise
    begin, end = part or (0, content.size)
    headers = {
        **_attachment_headers(content.name),
        "Accept-Ranges": "bytes",
        "Content-Length": str(end - begin),
        "ETag": content.etag,
    }
    if part is not None:
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{content.size}"
    return Sending(
        content.read_range(begin, end),
        content.resources,
        service.settings.file_send_seconds,
        headers=headers,
        media_type="application/octet-stream",
        status_code=200 if part is None else 206,
    )


@router.get(
    "/v1/jobs/{job_id}/files/archive",
    dependencies=[needs(Scope.JOBS_READ)],
    response_class=StreamingResponse,
    responses=_ARCHIVE,
    summary="Read a directory of a job's files as a tar",
)
def get_archive(service: ServiceDep, job_id: str, path: Below = "", everything: All = False) -> Response:
    """A tar with files and directories only: links, FIFOs and devices are left out, and `Ratchet-Notes` has their number. Each
    file has its content at the time when it is added."""
    archive = service.files.archive(job_id, path, include_unchanged=everything)
    headers = {
        **_attachment_headers(archive.name),
        "Ratchet-Entries": str(archive.entries),
        "Ratchet-Size": str(archive.size),
        "Ratchet-Notes": json.dumps(archive.notes),
    }
    seconds = service.settings.file_send_seconds
    return Sending(archive.parts, archive.resources, seconds, headers=headers, media_type="application/x-tar")


def _attachment_headers(name: str) -> dict[str, str]:
    """Return headers that make a browser save the response as a file called ``name`` (RFC 6266, RFC 8187)."""
    raw = name.encode("utf-8", "surrogateescape")
    plain = "".join(chr(c) if 0x20 <= c < 0x7F and chr(c) not in '"\\%' else "_" for c in raw)
    return {
        # users' code may have written a page with scripts
        "Content-Disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(raw, safe='')}",
        **_NO_SNIFFING,
    }
