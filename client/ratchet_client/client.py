"""``RatchetClient``: the REST API as typed Python calls. Synchronous; safe to use from one thread at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from pydantic import BaseModel

from ratchet_client.access import Access
from ratchet_client.calls import PAGE, quota_path
from ratchet_client.errors import ServiceFault, ServiceUnreachable
from ratchet_client.exports import ExportFormat, fetch
from ratchet_client.following import Following, WhichAttempt
from ratchet_client.job import Job
from ratchet_client.job_files import Bar, Fetched, no_bar
from ratchet_client.job_files import fetch as fetch_files
from ratchet_client.polling import TERMINAL, Series, Snapshot
from ratchet_client.spec_file import Spec, spec_body
from ratchet_client.transport import Params, Transport
from ratchet_client.upload import Note, with_code
from ratchet_contract import api, api_queue, api_quotas, api_requests

__all__ = ["TERMINAL", "Job", "RatchetClient", "Series", "Snapshot", "WhichAttempt"]


class RatchetClient(Following, Access):
    """Talks to one service, found as the command line finds it.

    ``base_url``: its address; default ``RATCHET_SERVER``, else the configuration file's, else ``service.json`` of the run
    directory ``home`` (default ``RATCHET_HOME``, else ``./.ratchet`` if it is there, else that of this user's one service that
    runs), read again when a connection fails, so that a restarted service is found. ``token``: default ``RATCHET_TOKEN``, else
    the configuration file's for that server; sent as bearer token.
    ``timeout``: seconds for one request. ``retry_for``: seconds over which one call is repeated while nothing answers.
    Every method raises the errors of ``ratchet_contract.errors`` and ``ratchet_client.errors``. What is listed comes as a lazy
    iterator of models (``ratchet_contract.api``). Calls are repeated while nothing answers: a POST with the same
    Idempotency-Key, so that it acts once; a PATCH, since it sets values; a DELETE only if it cannot have arrived.

    >>> with ratchet.Client() as client:
    ...     client.ready()
    True
    """

    def __init__(self, base_url: str | None = None, home: str | os.PathLike[str] | None = None, timeout: float = 30.0,
                 retry_for: float = 10.0, token: str | None = None) -> None:  # fmt: skip
        self._transport = Transport(base_url, home, timeout, retry_for, token)

    def __repr__(self) -> str:
        return f"<RatchetClient {self._transport.place()}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._transport.close()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def submit(self, spec: Spec, *, adopt: str | os.PathLike[str] | None = None, idempotency_key: str | None = None,
               upload: bool | None = None, note: Note | None = None) -> Job:  # fmt: skip
        """Create a job from the path of a YAML file, a mapping or a ``JobSpec``. Raises ``SpecError`` with every wrong field.

        Relative paths of the spec start at the file's directory, or at the current one where there is no file. The same
        ``idempotency_key`` with the same spec gives the same job again.

        ``adopt``: the directory, on the service's machine, of a run of the spec's script without a service. The job goes on from
        its newest checkpoint, of which it has a copy; the directory stays as it is.

        ``upload``: send the directory ``code.path`` of this machine first; False: it is one of the service's machine; None: it
        is sent where the service's address is not this machine's, if there is such a directory here. The service is asked
        first whether it has it already. ``note``: is told in sentences what ignore files leave out, which is a ``UserWarning``
        without it, and how far the sending is, if it is much.

        >>> task = {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 1}}
        >>> job = client.submit({"name": "from-python", "task": task, "world": {"device": "cpu"}}, idempotency_key=key)
        >>> client.submit({"name": "from-python", "task": task, "world": {"device": "cpu"}}, idempotency_key=key).id == job.id
        True
        >>> job.cancel().view.desired.value in ("cancel", "run")
        True
        """
        body = with_code(self._transport, spec_body(spec), upload, note)
        params: Params = {"adopt": _absolute(adopt)}
        view = self._post("/v1/jobs", api.JobView, params=params, json=body, idempotency_key=idempotency_key)
        return Job(self, view)

    def job(self, job: str | Job) -> Job:
        """The job with this id or, alone, this name, as it is now. Raises ``NotFound``, ``AmbiguousName``.

        >>> client.job(job_id).phase.value
        'SUCCEEDED'
        """
        return Job(self, self.view(job))

    def plan(self, spec: Spec, *, adopt: str | os.PathLike[str] | None = None, upload: bool | None = None,
             note: Note | None = None) -> api.PlanView:  # fmt: skip
        """What ``submit`` would run of ``spec``, with all checks made, those of ``adopt`` too. No job is stored; code is sent as
        ``submit`` does, and kept by the service for ten minutes.

        >>> client.plan("examples/digits-powersgd.yaml").resolved.backend
        'gloo'
        """
        body = with_code(self._transport, spec_body(spec), upload, note)
        return self._post("/v1/jobs", api.PlanView, params={"dry_run": "true", "adopt": _absolute(adopt)}, json=body)

    def jobs(self, *, phase: Collection[str] = (), label: Mapping[str, str] | None = None, name: str | None = None,
             sort: str | None = None, owner: str | None = None, page_size: int = PAGE) -> Iterator[api.JobView]:  # fmt: skip
        """All jobs that fit, newest first unless ``sort`` says otherwise (``created``, ``name``, ``priority``; with ``-`` in
        front: descending); pages are fetched while iterating. ``phase``: in one of these; ``label``: with all of these values;
        ``name``: with this name; ``owner``: of this owner.

        >>> job_id in [job.id for job in client.jobs(phase=["SUCCEEDED"])]
        True
        """
        labels = [f"{k}={v}" for k, v in (label or {}).items()]
        params: Params = {
            "phase": list(phase),
            "label": labels,
            "name": name,
            "sort": sort,
            "owner": owner,
            "limit": page_size,
        }
        return self._pages("/v1/jobs", api.JobView, params)

    def suspend(self, job: str | Job) -> api.JobView:
        """Save, stop, and stay stopped until ``resume``. Raises ``Conflict`` like all actions, by the phase."""
        return self._act(job, "suspend")

    def resume(self, job: str | Job, from_step: int | None = None, *, world: int | None = None, nodes: int | None = None,
               hook: dict[str, Any] | str | None = None, on_hook_mismatch: str | None = None,
               code: str | os.PathLike[str] | None = None, include: Sequence[str] | None = None,
               upload: bool | None = None, note: Note | None = None) -> api.JobView:  # fmt: skip
        """Go on: suspended, failed and cancelled jobs. ``from_step``: from an older checkpoint; ``world``: with another number
        of ranks (per node), and with it ``nodes``; ``hook``: another hook, or changes of this one; the report tells of both.
        ``on_hook_mismatch``: the job's policy from now on (fail, reset, redistribute). ``code``: a directory with other code, of
        which a new snapshot is taken; without it the job goes on with the code that it was submitted with. ``include``: with
        ``code``, the job's ``code.include`` from now on. ``upload``, ``note``: as of ``submit``, for ``code``."""
        job = self.job_id(job)
        given: dict[str, Any] = {"from_step": from_step, "hook": hook, "on_hook_mismatch": on_hook_mismatch}
        if world is not None:
            given["world"] = api_requests.WorldChange(ranks_per_node=world, nodes=nodes)
        if code is not None:
            named = {"path": str(Path(code).expanduser().absolute())}
            if include is None:
                include = (self.view(job).spec.get("code") or {}).get("include", [])
            given["code"] = with_code(self._transport, {"code": {**named, "include": include}}, upload, note)["code"]
        request = api_requests.ResumeRequest.model_validate({k: v for k, v in given.items() if v is not None})
        return self._act(job, "resume", request)

    def cancel(self, job: str | Job) -> api.JobView:
        """End the job; what runs saves a checkpoint first."""
        return self._act(job, "cancel")

    def preempt(self, job: str | Job) -> api.JobView:
        """Save, stop and queue again."""
        return self._act(job, "preempt")

    def checkpoint_now(self, job: str | Job) -> api.JobView:
        """Ask the running attempt for a checkpoint at its next agreed step; returns before it is written."""
        return self._act(job, "checkpoint")

    def fork(self, job: str | Job, request: api_requests.ForkRequest, *, upload: bool | None = None,
             note: Note | None = None) -> Job:  # fmt: skip
        """A new job from a checkpoint of this one, with a changed spec: ``request`` has the step or the checkpoint, and the keys
        of the spec that change. ``upload``, ``note``: as of ``submit``, for a ``code.path`` that the request names.

        >>> fork = client.fork(job_id, ratchet.ForkRequest(spec={"task": {"args": {"epochs": 3}}}))
        >>> fork.view.forked_from.startswith(job_id), fork.cancel().id == fork.id
        (True, True)
        """
        job = self.job_id(job)
        spec = with_code(self._transport, request.spec, upload, note, within="/spec")
        if spec is not request.spec:
            request = request.model_copy(update={"spec": spec})
        return Job(self, self._act(job, "fork", request))

    def patch(self, job: str | Job, request: api_requests.PatchRequest) -> api.JobView:
        """Set labels and priority: ``request`` has what changes.

        >>> client.patch(job_id, ratchet.PatchRequest(labels={"team": "vision"})).labels["team"]
        'vision'
        """
        body = request.model_dump(mode="json", exclude_unset=True)
        return api.JobView.model_validate(self._transport.request("PATCH", self._path(job), json=body).json())

    def delete(self, job: str | Job, *, keep_checkpoints: bool = False, outputs: bool = False) -> api.DeleteResult:
        """Remove a job that has ended, its logs, and its checkpoints, unless ``keep_checkpoints``. What it left in its working
        directory stays where the answer says, unless ``outputs`` is true, now or in a later call. Raises ``Conflict`` for a job
        that has not ended."""
        params: Params = {
            "keep_checkpoints": "true" if keep_checkpoints else None,
            "outputs": "true" if outputs else None,
        }
        return api.DeleteResult.model_validate(self._transport.request("DELETE", self._path(job), params=params).json())

    # --- what belongs to a job ----------------------------------------------------------------------------------------

    def attempts(self, job: str | Job) -> list[api.AttemptView]:
        """Every launch, oldest first.

        >>> newest = client.attempts(job_id)[-1]
        >>> newest.cause.value, newest.resume_report.verdict
        ('completed', 'fresh')
        """
        return list(self._job_pages(api.AttemptView, {"limit": PAGE}, job, "attempts"))[::-1]

    def attempt(self, job: str | Job, number: int | None = None) -> api.AttemptView:
        """One launch by its ``number``, from 1; without it the newest. Raises ``NotFound``."""
        job = self.job_id(job)
        if number is None:
            number = self.view(job).attempt
        return self._get(self._path(job, "attempts", str(number)), api.AttemptView)

    def checkpoints(self, job: str | Job) -> Iterator[api.CheckpointView]:
        """What is stored, newest step first."""
        return self._job_pages(api.CheckpointView, {"limit": PAGE}, job, "checkpoints")

    def checkpoint(self, job: str | Job, checkpoint_id: str) -> api.CheckpointDetail:
        """One checkpoint with its manifest. Raises ``NotFound``."""
        return self._get(self._path(job, "checkpoints", checkpoint_id), api.CheckpointDetail)

    def verify(self, job: str | Job, checkpoint_id: str) -> api.VerifyResult:
        """Have every byte of a checkpoint read and compared with its digests.

        >>> client.verify(job_id, client.job(job_id).last_checkpoint).verification
        'ok'
        """
        return self._post(self._path(job, "checkpoints", checkpoint_id, "verify"), api.VerifyResult)

    def compare(self, job: str | Job, with_job: str | Job, *, checkpoint: str | None = None,
                with_checkpoint: str | None = None) -> api.ComparisonView:  # fmt: skip
        """Two jobs' checkpoints, every tensor and every rank's state: at the first step at which they differ, of those that both
        have a checkpoint of; if they differ nowhere, at the newest. Or of the checkpoints that ``checkpoint`` (of ``job``) and
        ``with_checkpoint`` (of ``with_job``) name. Raises ``Conflict`` where both have no step in common.

        >>> client.compare(job_id, job_id).identical
        True
        """
        params: Params = {"checkpoint": checkpoint, "with_checkpoint": with_checkpoint}
        return self._get(self._path(job, "compare", self.job_id(with_job)), api.ComparisonView, params)

    def export(self, job: str | Job, checkpoint_id: str, target: str | os.PathLike[str], *,
               format: ExportFormat = "safetensors") -> list[str]:  # fmt: skip
        """Write a checkpoint as files for other programs; ``target`` must not be there yet. Returns what their reader must know.

        ``format``: ``safetensors``: one file, the model alone. ``torch``: a directory with one file per rank, for ``torch.load``.
        ``dcp``: a directory for ``torch.distributed.checkpoint.load``.

        >>> client.export(job_id, client.job(job_id).last_checkpoint, directory / "model.safetensors")
        []
        """
        return fetch(self._transport, self._path(job, "checkpoints", checkpoint_id, "export"), format, Path(target))

    def pin(self, job: str | Job, checkpoint_id: str, pinned: bool = True) -> api.CheckpointView:
        """Keep a checkpoint whatever retention says, or with ``pinned=False`` let it go again.

        >>> client.pin(job_id, client.job(job_id).last_checkpoint).pinned
        True
        """
        body = api_requests.PinRequest(pinned=pinned).model_dump(mode="json")
        return self._post(self._path(job, "checkpoints", checkpoint_id, "pin"), api.CheckpointView, json=body)

    def prune(self, job: str | Job, *, dry_run: bool = False, quarantined: bool = False) -> api.PruneResult:
        """Remove checkpoints that no attempt will start from: of branches that a resume from an earlier step left behind.

        ``dry_run``: only tell what would go. ``quarantined``: what was damaged and set aside goes, too.

        >>> client.prune(job_id, dry_run=True).checkpoints
        []
        """
        body = api_requests.PruneRequest(dry_run=dry_run, quarantined=quarantined).model_dump(mode="json")
        return self._post(self._path(job, "checkpoints", "prune"), api.PruneResult, json=body)

    # --- what a job left in its working directory ---------------------------------------------------------------------

    def files(self, job: str | Job, path: str = "", *, recursive: bool = True, everything: bool = False,
              page_size: int = 1000) -> Iterator[api.FileView]:  # fmt: skip
        """What is below ``path`` of its working directory, each directory before what is in it; with ``recursive=False`` without
        what is in directories. ``everything``: with what its
        code brought there and nobody has changed.

        >>> [file.path for file in client.files(job_id)]
        []
        """
        params: Params = {
            "path": path or None,
            "recursive": None if recursive else "false",
            "all": "true" if everything else None,
            "limit": page_size,
        }
        return self._job_pages(api.FileView, params, job, "files")

    def read_file(self, job: str | Job, path: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes of the file ``path`` from ``start`` up to ``end`` (default: its end, as it is now), which are held in memory.

        Raises ``NotFound`` (``file-not-found``), ``Refused`` (``range-not-satisfiable``: there are none, ``symbolic-link`` ...).
        """
        if end is not None and end <= start:
            return b""
        ranged = {} if (start, end) == (0, None) else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        with self._transport.stream(self._path(job, "files", "content"), {"path": path}, ranged) as response:
            return response.read()

    def fetch_files(self, job: str | Job, target: str | os.PathLike[str], path: str = "", *, everything: bool = False,
                    force: bool = False, bar: Callable[[int], Bar] = no_bar) -> Fetched:  # fmt: skip
        """Write the file or directory ``path`` of its working directory into the directory ``target``, under its own name; all of
        it without ``path``. No file is replaced without ``force``; what is fetched is whole, or nothing is written.
        ``everything``: with what its code brought there. ``bar``: shows how far it is (``job_files.fetch``).

        >>> client.fetch_files(job_id, directory / "outputs").files
        []
        """
        params = {"path": path or None, "all": "true" if everything else None}
        return fetch_files(self._transport, self._path(job, "files", "archive"), params, Path(target), force, bar)

    # --- queue and quotas ---------------------------------------------------------------------------------------------

    def queue(self, limit: int = 50) -> list[api_queue.QueuedView]:
        """Who is next, of everybody's jobs, and why each waits: the first ``limit``.

        >>> [one.position for one in client.queue()] in ([], [1])
        True
        """
        return list(islice(self._pages("/v1/queue", api_queue.QueuedView, {"limit": min(limit, 100)}), limit))

    def queue_view(self, limit: int = 50, job: str | Job | None = None) -> api_queue.QueueView:
        """One page of at most ``limit`` (100 at most), with how many wait in all; or where ``job`` stands: no item where it is
        not queued."""
        params: Params = {"limit": limit} if job is None else {"job_id": self.job_id(job)}
        return self._get("/v1/queue", api_queue.QueueView, params)

    def quotas(self) -> Iterator[api_quotas.QuotaView]:
        """Those that were set, with what their owners have now."""
        return self._pages("/v1/quotas", api_quotas.QuotaView, {})

    def quota(self, owner: str) -> api_quotas.QuotaView:
        """What counts for an owner, be it the quota of ``*`` or none, and what it has now.

        >>> client.quota("local").in_use.jobs >= 0
        True
        """
        return self._get(quota_path(owner), api_quotas.QuotaView)

    def set_quota(self, owner: str, request: api_quotas.QuotaRequest) -> api_quotas.QuotaView:
        """``request`` is the whole quota of an owner, or of ``*``: each owner without one of its own. What is left out has no
        limit."""
        body = request.model_dump(mode="json")
        return api_quotas.QuotaView.model_validate(self._transport.request("PUT", quota_path(owner), json=body).json())

    def delete_quota(self, owner: str) -> None:
        """From then on that of ``*`` counts, if there is one. Raises ``NotFound``."""
        self._transport.request("DELETE", quota_path(owner))

    # --- the service --------------------------------------------------------------------------------------------------

    def hooks(self) -> list[api.HookInfo]:
        """Every hook that is known, with its parameters.

        >>> [hook.name for hook in client.hooks() if hook.available][:3]
        ['allreduce', 'fp16_compress', 'bf16_compress']
        """
        return list(self._pages("/v1/hooks", api.HookInfo, {}))

    def hook_info(self, name: str) -> api.HookInfo:
        """The hook ``name``, with its parameters as a JSON schema. Raises ``NotFound``."""
        return self._get(f"/v1/hooks/{quote(name, safe='')}", api.HookInfo)

    def ready(self) -> bool:
        """Whether the service answers and its database does too."""
        try:
            self._transport.request("GET", "/readyz")
        except (ServiceUnreachable, ServiceFault):
            return False
        return True

    def _act(self, job: str | Job, action: str, body: BaseModel | None = None) -> api.JobView:
        data = None if body is None else body.model_dump(mode="json", exclude_unset=True)
        return self._post(self._path(job, action), api.JobView, json=data)


def _absolute(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())
