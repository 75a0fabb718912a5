"""``RatchetClient``: the REST API as typed Python calls. Synchronous; safe to use from one thread at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, Self, TypeAlias, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from ratchet_client import sse
from ratchet_client.errors import DeadlineReached, ServiceUnreachable
from ratchet_client.transport import Params, Transport
from ratchet_contract import api
from ratchet_contract.phases import JobPhase
from ratchet_contract.spec import JobSpec

M = TypeVar("M", bound=BaseModel)
WhichAttempt: TypeAlias = int | Literal["all"] | None
"""Whose logs: None the newest attempt's (and, when following, those that come later)."""
TERMINAL = frozenset(phase for phase in JobPhase if phase.terminal)
_PAGE = 100


class RatchetClient:
    """Talks to one service.

    ``base_url``: its address; default ``RATCHET_SERVER``, else ``service.json`` of the run directory ``home`` (default
    ``RATCHET_HOME``, else ``./.ratchet``), read again when a connection fails, so that a restarted service is found.
    ``timeout``: seconds for one request. ``retry_for``: seconds over which one call is repeated while nothing answers.
    Every method raises the errors of ``ratchet_contract.errors`` and ``ratchet_client.errors``.
    """

    def __init__(self, base_url: str | None = None, home: str | os.PathLike[str] | None = None, timeout: float = 30.0,
                 retry_for: float = 10.0) -> None:  # fmt: skip
        self._transport = Transport(base_url, home, timeout, retry_for)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSpec | Mapping[str, Any], *, idempotency_key: str | None = None) -> api.JobView:
        """Create a job. The same ``idempotency_key`` with the same spec gives the same job again."""
        return self._post("/v1/jobs", api.JobView, json=_body(spec), idempotency_key=idempotency_key)

    def plan(self, spec: JobSpec | Mapping[str, Any]) -> api.PlanView:
        """What ``submit`` would run, with all checks made. Nothing is stored."""
        return self._post("/v1/jobs", api.PlanView, params={"dry_run": "true"}, json=_body(spec))

    def job(self, job_id: str) -> api.JobView:
        return self._get(_job(job_id), api.JobView)

    def jobs(self, *, phase: Collection[str] = (), label: Mapping[str, str] | None = None, name: str | None = None,
             sort: str | None = None, page_size: int = _PAGE) -> Iterator[api.JobView]:  # fmt: skip
        """All jobs that fit, newest first unless ``sort`` says otherwise; pages are fetched while iterating."""
        labels = [f"{k}={v}" for k, v in (label or {}).items()]
        params: Params = {"phase": list(phase), "label": labels, "name": name, "sort": sort, "limit": page_size}
        return self._pages("/v1/jobs", api.JobView, params)

    def suspend(self, job_id: str) -> api.JobView:
        return self._act(job_id, "suspend")

    def resume(self, job_id: str, from_step: int | None = None) -> api.JobView:
        return self._act(job_id, "resume", api.ResumeRequest(from_step=from_step))

    def cancel(self, job_id: str) -> api.JobView:
        return self._act(job_id, "cancel")

    def preempt(self, job_id: str) -> api.JobView:
        return self._act(job_id, "preempt")

    def checkpoint_now(self, job_id: str) -> api.JobView:
        """Ask the running attempt for a checkpoint at its next agreed step; returns before it is written."""
        return self._act(job_id, "checkpoint")

    def fork(self, job_id: str, request: api.ForkRequest) -> api.JobView:
        return self._act(job_id, "fork", request)

    def patch(self, job_id: str, request: api.PatchRequest) -> api.JobView:
        body = request.model_dump(mode="json", exclude_unset=True)
        return api.JobView.model_validate(self._transport.request("PATCH", _job(job_id), json=body).json())

    def delete(self, job_id: str, *, keep_checkpoints: bool = False) -> api.DeleteResult:
        """Remove a job that has ended, and its checkpoints unless they are to be kept."""
        params: Params = {"keep_checkpoints": "true" if keep_checkpoints else None}
        return api.DeleteResult.model_validate(self._transport.request("DELETE", _job(job_id), params=params).json())

    # --- what belongs to a job ----------------------------------------------------------------------------------------

    def hook(self, job_id: str) -> api.HookView:
        return self._get(f"{_job(job_id)}/hook", api.HookView)

    def hook_history(self, job_id: str, *, rank: int | None = None) -> Iterator[api.HookSampleView]:
        """Kept summaries by step and rank, oldest first."""
        params: Params = {"rank": rank, "limit": _PAGE}
        return self._pages(f"{_job(job_id)}/hook/history", api.HookSampleView, params)

    def attempts(self, job_id: str) -> Iterator[api.AttemptView]:
        """Every launch, newest first."""
        return self._pages(f"{_job(job_id)}/attempts", api.AttemptView, {"limit": _PAGE})

    def attempt(self, job_id: str, number: int) -> api.AttemptView:
        return self._get(f"{_job(job_id)}/attempts/{number}", api.AttemptView)

    def checkpoints(self, job_id: str) -> Iterator[api.CheckpointView]:
        """What is stored, newest step first."""
        return self._pages(f"{_job(job_id)}/checkpoints", api.CheckpointView, {"limit": _PAGE})

    def checkpoint(self, job_id: str, checkpoint_id: str) -> api.CheckpointDetail:
        return self._get(_checkpoint(job_id, checkpoint_id), api.CheckpointDetail)

    def verify(self, job_id: str, checkpoint_id: str) -> api.VerifyResult:
        """Have every byte of a checkpoint read and compared with its digests."""
        return self._post(f"{_checkpoint(job_id, checkpoint_id)}/verify", api.VerifyResult)

    def pin(self, job_id: str, checkpoint_id: str, pinned: bool = True) -> api.CheckpointView:
        body = api.PinRequest(pinned=pinned).model_dump(mode="json")
        return self._post(f"{_checkpoint(job_id, checkpoint_id)}/pin", api.CheckpointView, json=body)

    def metrics(self, job_id: str, *, name: Collection[str] = (), max_points: int | None = None) -> api.MetricsView:
        """Series over steps; a series longer than ``max_points`` is thinned, the last point is always there."""
        params: Params = {"name": list(name), "max_points": max_points}
        return self._get(f"{_job(job_id)}/metrics", api.MetricsView, params)

    def events(self, job_id: str) -> Iterator[api.EventView]:
        return self._pages(f"{_job(job_id)}/events", api.EventView, {"limit": _PAGE})

    def logs(self, job_id: str, *, rank: int | None = None, attempt: WhichAttempt = None, tail: int | None = None,
             grep: str | None = None, since: str | None = None) -> Iterator[api.LogLine]:  # fmt: skip
        """Lines of the ranks' logs that are there now. ``tail``: only the last lines of each rank; ``grep``: only lines with
        this text; ``since`` (RFC 3339): only logs written to since then, whole."""
        params: Params = {"rank": rank, "attempt": attempt, "tail": tail, "grep": grep, "since": since}
        return self._pages(f"{_job(job_id)}/logs", api.LogLine, params)

    # --- following ----------------------------------------------------------------------------------------------------

    def follow_events(self, job_id: str, *, after: int | None = None,
                      on_gap: Callable[[str], None] | None = None) -> Iterator[api.EventView]:  # fmt: skip
        """Events from the first (or after event ``after``) until the job has ended, across restarts of the service."""
        events = sse.follow(
            self._transport, f"{_job(job_id)}/events", {"follow": "true"}, lambda: self.job(job_id).phase.terminal,
            None if after is None else str(after), on_gap,
        )  # fmt: skip
        return (api.EventView.model_validate_json(e.data) for e in events)

    def follow_logs(self, job_id: str, *, rank: int | None = None, attempt: WhichAttempt = None, tail: int | None = None,
                    grep: str | None = None,
                    on_gap: Callable[[str], None] | None = None) -> Iterator[api.LogLine]:  # fmt: skip
        """Log lines as they are written, until the job has ended."""
        params: Params = {"follow": "true", "rank": rank, "attempt": attempt, "tail": tail, "grep": grep}
        lines = sse.follow(
            self._transport, f"{_job(job_id)}/logs", params, lambda: self.job(job_id).phase.terminal, None, on_gap
        )
        return (api.LogLine.model_validate_json(e.data) for e in lines)

    def wait(self, job_id: str, until: Collection[JobPhase] = TERMINAL, deadline: float | None = None,
             on_change: Callable[[api.JobView], None] | None = None) -> api.JobView:  # fmt: skip
        """The job once its phase is one of ``until``, or once it has ended.

        ``deadline``: seconds from now, then ``DeadlineReached``; a service that is away is waited for until then, or for
        ``retry_for`` seconds without a deadline. ``on_change`` is called with every new phase.
        """
        end = None if deadline is None else time.monotonic() + deadline
        delay, phase, last = 0.1, None, None
        while True:
            try:
                job = self.job(job_id)
            except ServiceUnreachable as error:
                if end is None:
                    raise
                last = error.detail
            else:
                if job.phase is not phase:
                    phase, delay = job.phase, 0.1
                    if on_change is not None:
                        on_change(job)
                if phase in until or phase in TERMINAL:
                    return job
                last = f"it is {phase}, step {job.progress.step}"
            if end is not None and time.monotonic() + delay > end:
                wanted = ", ".join(sorted(until))
                raise DeadlineReached(f"job {job_id} was not {wanted} after {deadline:g} s: {last}; the job goes on")
            time.sleep(delay)
            delay = min(delay * 1.5, 1.0)

    # --- the service --------------------------------------------------------------------------------------------------

    def hooks(self) -> list[api.HookInfo]:
        return list(self._pages("/v1/hooks", api.HookInfo, {}))

    def hook_info(self, name: str) -> api.HookInfo:
        return self._get(f"/v1/hooks/{quote(name, safe='')}", api.HookInfo)

    def ready(self) -> bool:
        """Whether the service answers and its database does too."""
        try:
            self._transport.request("GET", "/readyz")
        except ServiceUnreachable:
            return False
        return True

    def _get(self, path: str, model: type[M], params: Params | None = None) -> M:
        return model.model_validate(self._transport.request("GET", path, params=params).json())

    def _post(self, path: str, model: type[M], **options: Any) -> M:
        return model.model_validate(self._transport.request("POST", path, **options).json())

    def _act(self, job_id: str, action: str, body: BaseModel | None = None) -> api.JobView:
        data = None if body is None else body.model_dump(mode="json", exclude_unset=True)
        return self._post(f"{_job(job_id)}/{action}", api.JobView, json=data)

    def _pages(self, path: str, model: type[M], params: Params) -> Iterator[M]:
        cursor: str | None = None
        while True:
            body = self._transport.request("GET", path, params={**params, "cursor": cursor}).json()
            yield from (model.model_validate(item) for item in body["items"])
            cursor = body.get("next_cursor")
            if cursor is None:
                return


def _job(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _checkpoint(job_id: str, checkpoint_id: str) -> str:
    return f"{_job(job_id)}/checkpoints/{quote(checkpoint_id, safe='')}"


def _body(spec: JobSpec | Mapping[str, Any]) -> dict[str, Any]:
    return spec.model_dump(mode="json", exclude_unset=True) if isinstance(spec, JobSpec) else dict(spec)
