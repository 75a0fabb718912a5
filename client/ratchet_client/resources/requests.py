"""The requests of ``RatchetClient``: one model per request, pages as one iterator, jobs by id or name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from ratchet_client.http.errors import AmbiguousName
from ratchet_client.http.transport import Params, Transport
from ratchet_contract.api.views import JobView
from ratchet_contract.errors import NotFound
from ratchet_contract.paths import is_job_id

if TYPE_CHECKING:
    from ratchet_client.resources.job import Job

M = TypeVar("M", bound=BaseModel)
PAGE = 100
_LONGEST_NAME = 63
_SHOWN = 10


class Calls:
    """Base class of ``RatchetClient`` with what all groups of methods use. The client's constructor sets ``_transport``."""

    _transport: Transport

    def job_id(self, job: str | Job) -> str:
        """Return the id of the job with this id or name. An id is returned unchanged, without a check that the job exists. If
        several jobs have the name, the only one that has not ended is meant. Raises ``NotFound`` if no job has the name. Raises
        ``AmbiguousName`` if several jobs have it, and all have ended or more than one has not."""
        if not isinstance(job, str):
            return job.id
        if is_job_id(job):
            return job
        found = (
            list(self._pages("/v1/jobs", JobView, {"name": job, "limit": PAGE})) if len(job) <= _LONGEST_NAME else []
        )
        if not found:
            raise self._no_such_job(job)
        meant = found if len(found) == 1 else [view for view in found if not view.phase.terminal]
        if len(meant) == 1:
            return meant[0].id
        raise _ambiguous_name(job, found)

    def _no_such_job(self, job: str) -> NotFound:
        """Return the error for a name that no job has. Requests the names of other jobs, to suggest a similar one."""
        names = {other.name for other in islice(self._pages("/v1/jobs", JobView, {"limit": PAGE}), PAGE)}
        near = get_close_matches(job, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`ratchet list` shows the jobs"
        return NotFound(f"no job has the id or the name {job!r}; {hint}", code="job-not-found")

    def _path(self, job: str | Job, *parts: str) -> str:
        """Return the API path of the job, or of a resource below it. If ``job`` is a name, a request finds the job's id."""
        return "/".join(["/v1/jobs", self.job_id(job), *(quote(part, safe="") for part in parts)])

    def _get(self, path: str, model: type[M], params: Params | None = None) -> M:
        """Send a GET request and return the response as ``model``."""
        return model.model_validate(self._transport.request("GET", path, params=params).json())

    def _post(self, path: str, model: type[M], **options: Any) -> M:
        """Send a POST request and return the response as ``model``. ``options``: as for ``Transport.request``."""
        return model.model_validate(self._transport.request("POST", path, **options).json())

    def _pages(self, path: str, model: type[M], params: Params) -> Iterator[M]:
        """Yield every item of the list at ``path`` as ``model``. Each page is requested when it is needed."""
        cursor: str | None = None
        while True:
            body = self._transport.request("GET", path, params={**params, "cursor": cursor}).json()
            yield from (model.model_validate(item) for item in body["items"])
            cursor = body.get("next_cursor")
            if cursor is None:
                return

    def _job_pages(self, model: type[M], params: Params, job: str | Job, *parts: str) -> Iterator[M]:
        """Yield every item of a list below the job's path, as ``_pages`` does."""
        yield from self._pages(self._path(job, *parts), model, params)


def _ambiguous_name(name: str, jobs: Sequence[JobView]) -> AmbiguousName:
    """Return, and do not raise, the error for a name that several jobs have. ``jobs``: all of them, newest first."""
    shown = [f"  {job.id}  {job.phase:<9}  created {job.created_at:%Y-%m-%d %H:%M} UTC" for job in jobs[:_SHOWN]]
    shown += [f"  ... and {len(jobs) - _SHOWN} more: ratchet list --name {name}"] if len(jobs) > _SHOWN else []
    text = "\n".join([f"{len(jobs)} jobs have the name {name!r}; name one by its id:", *shown])
    return AmbiguousName(text, jobs=list(jobs))


def quota_path(owner: str) -> str:
    """Return the API path of the quota of ``owner``, which may be ``*``."""
    return f"/v1/quotas/{quote(owner, safe='*')}"
