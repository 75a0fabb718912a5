"""``RatchetClient``: the REST API as typed Python calls. Synchronous; safe to use from one thread at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from ratchet_client.http.errors import ServiceFault, ServiceUnreachable
from ratchet_client.http.transport import Params, Transport
from ratchet_client.resources.code_upload import Note, with_code
from ratchet_client.resources.export_download import ExportFormat, fetch
from ratchet_client.resources.follow import Following
from ratchet_client.resources.job import Job
from ratchet_client.resources.job_files import Bar, Fetched, no_progress
from ratchet_client.resources.job_files import fetch as fetch_files
from ratchet_client.resources.job_report import write_report
from ratchet_client.resources.poll import TERMINAL, Series, Snapshot, WhichAttempt
from ratchet_client.resources.requests import PAGE, quota_path
from ratchet_client.resources.spec_file import Spec, spec_body
from ratchet_client.resources.tokens import Access
from ratchet_client.resources.webhooks import Webhooks
from ratchet_contract.api import queue as api_queue
from ratchet_contract.api import quotas as api_quotas
from ratchet_contract.api import requests, views
from ratchet_contract.api import usage as api_usage
from ratchet_contract.spec.parse import problem_of, spec_error

__all__ = ["TERMINAL", "Job", "RatchetClient", "Series", "Snapshot", "WhichAttempt"]


class RatchetClient(Following, Access, Webhooks):
    """A client of one service. It finds the service in the same way as the command line.

    ``base_url``: the service's address. ``home``: the run directory whose ``service.json`` has the address. If neither is given,
    the first of these applies: ``RATCHET_SERVER``, ``RATCHET_HOME``, the configuration file's server, the directory
    ``./.ratchet`` if it exists (unless only ``ratchet run`` has used it), this user's only running service. ``token``: sent as
    bearer token; default: ``RATCHET_TOKEN``, else the configuration file's ``token``, which is sent only to its ``token_server``.
    ``timeout``: seconds without a byte after which one request fails; connections, uploads, downloads and streams have other
    limits. ``retry_for``: seconds for which one request is retried if the service does not respond, is not ready or is busy; a
    retry is safe. ``export``, ``fetch_files`` and ``read_file`` are not retried. A deletion is retried only if the request cannot
    have reached the service.

    Methods can raise the errors of ``ratchet_contract.errors`` and ``ratchet_client.errors``. An iterator over a list reads it
    page by page while it is consumed.

    >>> with ratchet.Client() as client:
    ...     client.ready()
    True
    """

    def __init__(self, base_url: str | None = None, home: str | os.PathLike[str] | None = None, timeout: float = 30.0,
                 retry_for: float = 10.0, token: str | None = None) -> None:  # fmt: skip
        self._transport = Transport(base_url, home, timeout, retry_for, token)

    def __repr__(self) -> str:
        return f"<RatchetClient {self._transport.address()}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._transport.close()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def submit(self, spec: Spec, *, adopt: str | os.PathLike[str] | None = None, idempotency_key: str | None = None,
               upload: bool | None = None, note: Note | None = None) -> Job:  # fmt: skip
        """Create a job from ``spec``: the path of a YAML or JSON file, a mapping, or a ``JobSpec``. Return the job without
        waiting for its start. Raises ``SpecError`` with the invalid fields.

        Relative paths of code, model and interpreter are relative to the file's directory; without a file, to the current one.
        ``idempotency_key``: for a day by default, a call with the same key and spec returns the same job; with another spec,
        ``Refused`` is raised.

        ``adopt``: a directory on the service's machine, where the spec's script has run without a service. The job continues from
        a copy of this run's newest checkpoint.

        ``upload``: True: upload the directory ``code.path`` of this machine first. False: ``code.path`` is a directory of the
        service's machine. None: upload the directory if it exists here and the service's address is not a loopback address.
        ``note``: a function that receives sentences about left-out and large files, and about the progress of a large upload.
        Without ``note``, a ``UserWarning`` reports those files.

        >>> task = {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 1}}
        >>> job = client.submit({"name": "from-python", "task": task, "world": {"device": "cpu"}}, idempotency_key=key)
        >>> client.submit({"name": "from-python", "task": task, "world": {"device": "cpu"}}, idempotency_key=key).id == job.id
        True
        >>> job.cancel().view.desired.value in ("cancel", "run")
        True
        """
        body = with_code(self._transport, spec_body(spec), upload, note)
        params: Params = {"adopt": _absolute(adopt)}
        view = self._post("/v1/jobs", views.JobView, params=params, json=body, idempotency_key=idempotency_key)
        return Job(self, view)

    def job(self, job: str | Job) -> Job:
        """Return the job with this id or name, with its current state. If several jobs have the name, return the only one that
        has not ended. Raises ``NotFound``. Raises ``AmbiguousName`` if all of these jobs have ended, or several have not.

        >>> client.job(job_id).phase.value
        'SUCCEEDED'
        """
        return Job(self, self.view(job))

    def plan(self, spec: Spec, *, adopt: str | os.PathLike[str] | None = None, upload: bool | None = None,
             note: Note | None = None) -> views.PlanView:  # fmt: skip
        """Check ``spec`` and ``adopt`` as ``submit`` does, but without the owner's quota, and return what would run. No job is
        stored. Code may be uploaded.

        >>> client.plan("examples/digits-powersgd.yaml").resolved.backend
        'gloo'
        """
        body = with_code(self._transport, spec_body(spec), upload, note)
        return self._post("/v1/jobs", views.PlanView, params={"dry_run": "true", "adopt": _absolute(adopt)}, json=body)

    def jobs(self, *, phase: Collection[str] = (), label: Mapping[str, str] | None = None, name: str | None = None,
             sort: str | None = None, owner: str | None = None, search: str | None = None, include: Collection[str] = (),
             page_size: int = PAGE) -> Iterator[views.JobView]:  # fmt: skip
        """Yield all matching jobs, newest first. ``sort``: order by ``created``, ``name`` or ``priority`` instead; a ``-`` in
        front means descending. ``phase``: only jobs in one of these phases. ``label``: only jobs with all of these labels.
        ``name``, ``owner``: only jobs with this name, or of this owner. ``search``: only jobs whose name or id begins with this
        text. ``include=["summary"]``: each job has its ``summary``.

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
            "search": search,
            "include": list(include),
            "limit": page_size,
        }
        return self._pages("/v1/jobs", views.JobView, params)

    def suspend(self, job: str | Job) -> views.JobView:
        """Request that the job saves a checkpoint, stops, and stays stopped until ``resume``. Returns without waiting for the
        stop. Raises ``Conflict`` in an unsuitable phase. A script without a Session is stopped without a checkpoint."""
        return self._act(job, "suspend")

    def resume(self, job: str | Job, from_step: int | None = None, *, world: int | None = None, nodes: int | None = None,
               hook: dict[str, Any] | str | None = None, on_hook_mismatch: str | None = None,
               code: str | os.PathLike[str] | None = None, include: Sequence[str] | None = None,
               upload: bool | None = None, note: Note | None = None) -> views.JobView:  # fmt: skip
        """Resume a suspended, failed or cancelled job, from its newest checkpoint if it has one. A queued or running job stays as
        it is if the call requests no change. Return the job's new state without waiting for the training.

        ``from_step``: the step of an older checkpoint to start from. ``world``: the new number of ranks per node. ``nodes``: with
        ``world``, the new number of nodes. ``hook``: the name of a new hook, or a mapping that is merged over the job's hook.
        ``on_hook_mismatch``: the job's policy from now on (fail, reset, redistribute). ``code``: a directory with new code.
        ``include``: with ``code``, the job's ``code.include`` from now on. ``upload``, ``note``: as in ``submit``, for ``code``.

        Raises ``Conflict`` if the job's state, policy or quota forbids the request, ``NotFound`` for a step without a usable
        checkpoint, ``SpecError`` for an invalid change, and ``ValueError`` for ``nodes`` without ``world`` or ``include`` without
        ``code``.
        """
        if nodes is not None and world is None:
            raise ValueError("nodes requires world, the number of ranks per node")
        if include is not None and code is None:
            raise ValueError("include requires code, the directory with the new code")
        job = self.job_id(job)
        given: dict[str, Any] = {"from_step": from_step, "hook": hook, "on_hook_mismatch": on_hook_mismatch}
        if world is not None:
            given["world"] = {"ranks_per_node": world, "nodes": nodes}
        if code is not None:
            named = {"path": str(Path(code).expanduser().absolute())}
            if include is None:
                include = (self.view(job).spec.get("code") or {}).get("include", [])
            given["code"] = with_code(self._transport, {"code": {**named, "include": include}}, upload, note)["code"]
        try:
            request = requests.ResumeRequest.model_validate({k: v for k, v in given.items() if v is not None})
        except ValidationError as error:
            faults = error.errors(include_url=False)
            raise spec_error([problem_of(fault, requests.ResumeRequest) for fault in faults], given) from None
        return self._act(job, "resume", request)

    def cancel(self, job: str | Job) -> views.JobView:
        """Request that the job ends; a running attempt saves a checkpoint first, if it can. Returns without waiting for the
        end."""
        return self._act(job, "cancel")

    def preempt(self, job: str | Job) -> views.JobView:
        """Request that the running attempt saves a checkpoint and stops. Returns without waiting. The job is then queued again,
        unless that exceeds its ``max_preemptions``."""
        return self._act(job, "preempt")

    def checkpoint_now(self, job: str | Job) -> views.JobView:
        """Request that the running attempt saves a checkpoint soon and continues to train. Returns before the checkpoint is
        written. Raises ``Conflict`` if no attempt can do this."""
        return self._act(job, "checkpoint")

    def fork(self, job: str | Job, request: requests.ForkRequest, *, upload: bool | None = None,
             note: Note | None = None) -> Job:  # fmt: skip
        """Create and return a new job that starts from a checkpoint of this job, with a changed spec. ``request``: the id of the
        checkpoint (default: the newest), the new job's name, and the keys of the spec that change. The service pins the
        checkpoint. ``upload``, ``note``: as in ``submit``, for a ``code.path`` in the request.

        >>> fork = client.fork(job_id, ratchet.ForkRequest(spec={"task": {"args": {"epochs": 3}}}))
        >>> fork.view.forked_from.startswith(job_id), fork.cancel().id == fork.id
        (True, True)
        """
        job = self.job_id(job)
        spec = with_code(self._transport, request.spec, upload, note, within="/spec")
        if spec is not request.spec:
            request = request.model_copy(update={"spec": spec})
        return Job(self, self._act(job, "fork", request))

    def patch(self, job: str | Job, request: requests.PatchRequest) -> views.JobView:
        """Change labels and priority of the job as in ``request``, and return the changed job. What ``request`` does not set
        stays unchanged; a label with the value None is removed.

        >>> client.patch(job_id, ratchet.PatchRequest(labels={"team": "vision"})).labels["team"]
        'vision'
        """
        body = request.model_dump(mode="json", exclude_unset=True)
        return views.JobView.model_validate(self._transport.request("PATCH", self._path(job), json=body).json())

    def delete(self, job: str | Job, *, keep_checkpoints: bool = False, outputs: bool = False) -> views.DeleteResult:
        """Delete an ended job with its logs and checkpoints. ``keep_checkpoints=True`` keeps the checkpoints. ``outputs=True``
        also deletes the job's working directory, even if the job itself was deleted earlier. Otherwise the files that the job
        made there are kept, and the result has the path of the directory. Raises ``Conflict`` if the job has not ended, or if a
        fork needs a checkpoint that would be deleted."""
        params: Params = {
            "keep_checkpoints": "true" if keep_checkpoints else None,
            "outputs": "true" if outputs else None,
        }
        return views.DeleteResult.model_validate(
            self._transport.request("DELETE", self._path(job), params=params).json()
        )

    def report(self, job: str | Job, target: str | os.PathLike[str], *, log_bytes: int = 65536,
               force: bool = False) -> list[str]:  # fmt: skip
        """Write the job's web page with its data, as it is now, to the file ``target``: HTML of at most about 40 MiB, which needs
        neither service nor network. Return sentences about what is left out. Blocks while it reads the job: one request for 100
        events, and some for each attempt.

        ``log_bytes``: number of bytes of each rank's log that the report has, the last ones, but at most one line for every 32 of
        them; 0: no logs. ``force``: replace an existing file, and nothing else; without it, an existing file raises ``Refused``.
        Raises ``Refused`` also if ``target`` cannot be written.

        >>> client.report(job_id, directory / "report.html")[-1].startswith("the contents of the job's files")
        True
        """
        return write_report(self._transport, self._path(job), Path(target), log_bytes=log_bytes, force=force)

    # --- attempts and checkpoints ----------------------------------------------------------------------------------------

    def attempts(self, job: str | Job, *, exclude: Collection[str] = ()) -> list[views.AttemptView]:
        """Return all attempts, oldest first. ``exclude``: parts to leave empty, which grow with the number of ranks:
        ``"components"`` (of the resume reports), ``"nodes"``.

        >>> newest = client.attempts(job_id)[-1]
        >>> newest.cause.value, newest.resume_report.verdict
        ('completed', 'fresh')
        >>> client.attempts(job_id, exclude=["components"])[-1].resume_report.components
        []
        """
        return list(self._job_pages(views.AttemptView, {"exclude": list(exclude), "limit": PAGE}, job, "attempts"))[
            ::-1
        ]

    def attempt(self, job: str | Job, number: int | None = None) -> views.AttemptView:
        """Return the attempt ``number`` (from 1; default: the newest). Raises ``NotFound`` if there is none."""
        job = self.job_id(job)
        if number is None:
            number = self.view(job).attempt
        return self._get(self._path(job, "attempts", str(number)), views.AttemptView)

    def checkpoints(self, job: str | Job) -> Iterator[views.CheckpointView]:
        """Yield the stored checkpoints, also quarantined ones, newest step first."""
        return self._job_pages(views.CheckpointView, {"limit": PAGE}, job, "checkpoints")

    def checkpoint(self, job: str | Job, checkpoint_id: str) -> views.CheckpointDetail:
        """Return one checkpoint and its manifest; the manifest is None if it cannot be read. Raises ``NotFound``."""
        return self._get(self._path(job, "checkpoints", checkpoint_id), views.CheckpointDetail)

    def verify(self, job: str | Job, checkpoint_id: str) -> views.VerifyResult:
        """Let the service read every byte of a checkpoint and compare it with the digests. Blocks until it is done.
        ``verification`` of the result says whether the checkpoint is damaged; a damaged one may be moved to the quarantine.
        Raises ``Conflict`` if the checkpoint is quarantined or deleted already.

        >>> client.verify(job_id, client.job(job_id).last_checkpoint).verification
        'ok'
        """
        return self._post(self._path(job, "checkpoints", checkpoint_id, "verify"), views.VerifyResult)

    def compare(self, job: str | Job, with_job: str | Job, *, checkpoint: str | None = None,
                with_checkpoint: str | None = None) -> views.ComparisonView:  # fmt: skip
        """Compare every tensor and every rank's state of two jobs' checkpoints. ``checkpoint`` (of ``job``) and
        ``with_checkpoint`` (of ``with_job``) select the checkpoints. If only one of them is given, the other job's checkpoint of
        the same step is used.

        By default, the steps at which both jobs' lineages have a checkpoint are compared, oldest first, up to the first that
        differs. The result is for that step, or for the newest one if all are equal. Raises ``Conflict`` if there is no common
        step, or if a selected checkpoint is quarantined or deleted.

        >>> client.compare(job_id, job_id).identical
        True
        """
        params: Params = {"checkpoint": checkpoint, "with_checkpoint": with_checkpoint}
        return self._get(self._path(job, "compare", self.job_id(with_job)), views.ComparisonView, params)

    def export(self, job: str | Job, checkpoint_id: str, target: str | os.PathLike[str], *,
               format: ExportFormat = "safetensors") -> list[str]:  # fmt: skip
        """Export a checkpoint to the new file or directory ``target``, for other programs. Blocks until all bytes are verified.
        Returns notes for the reader of the files. Raises ``Refused`` if ``target`` exists or cannot be written.

        ``format``: ``safetensors``: one file, only the model. ``torch``: a directory with one file per rank, for ``torch.load``.
        ``dcp``: a directory for ``torch.distributed.checkpoint.load``.

        >>> client.export(job_id, client.job(job_id).last_checkpoint, directory / "model.safetensors")
        []
        """
        return fetch(self._transport, self._path(job, "checkpoints", checkpoint_id, "export"), format, Path(target))

    def pin(self, job: str | Job, checkpoint_id: str, pinned: bool = True) -> views.CheckpointView:
        """Pin a checkpoint, so that retention does not delete it; ``pinned=False`` removes the pin. Returns the changed
        checkpoint. Raises ``Conflict`` if the checkpoint is quarantined or deleted, or if a fork still needs the pin.

        >>> client.pin(job_id, client.job(job_id).last_checkpoint).pinned
        True
        """
        body = requests.PinRequest(pinned=pinned).model_dump(mode="json")
        return self._post(self._path(job, "checkpoints", checkpoint_id, "pin"), views.CheckpointView, json=body)

    def prune(self, job: str | Job, *, dry_run: bool = False, quarantined: bool = False) -> views.PruneResult:
        """Delete unfinished checkpoints of ended attempts, and those of their checkpoints from which no attempt will start. For
        example, after a resume from an earlier step no attempt starts from the older checkpoints of later steps. Pinned
        checkpoints stay. Returns what was deleted.

        ``dry_run``: only return what would be deleted. ``quarantined``: also delete quarantined checkpoints, even pinned ones.

        >>> client.prune(job_id, dry_run=True).checkpoints
        []
        """
        body = requests.PruneRequest(dry_run=dry_run, quarantined=quarantined).model_dump(mode="json")
        return self._post(self._path(job, "checkpoints", "prune"), views.PruneResult, json=body)

    # --- files in a job's working directory ---------------------------------------------------------------------

    def files(self, job: str | Job, path: str = "", *, recursive: bool = True, everything: bool = False,
              page_size: int = 1000) -> Iterator[views.FileView]:  # fmt: skip
        """Yield the files, directories and links below ``path`` (or the file ``path``) in the job's working directory, each
        directory before its contents. The job's code is left out unless its files were changed; ``everything`` includes it.
        ``recursive=False``: only the direct entries of ``path``.

        >>> [file.path for file in client.files(job_id)]
        []
        """
        params: Params = {
            "path": path or None,
            "recursive": None if recursive else "false",
            "all": "true" if everything else None,
            "limit": page_size,
        }
        return self._job_pages(views.FileView, params, job, "files")

    def read_file(self, job: str | Job, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of the file ``path`` from ``start`` up to but not including ``end`` (default: the current end of the
        file). If ``end`` is not after ``start``, return ``b""`` without a request.

        Raises ``NotFound`` (``file-not-found``), and ``Refused`` with a code such as ``range-not-satisfiable`` or
        ``symbolic-link``.
        """
        if end is not None and end <= start:
            return b""
        ranged = {} if (start, end) == (0, None) else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        with self._transport.stream(self._path(job, "files", "content"), {"path": path}, ranged) as response:
            return response.read()

    def fetch_files(self, job: str | Job, target: str | os.PathLike[str], path: str = "", *, everything: bool = False,
                    force: bool = False, bar: Callable[[int], Bar] = no_progress) -> Fetched:  # fmt: skip
        """Download the file or directory ``path`` of the job's working directory (default: all of it) into the directory
        ``target``. Blocks until all is written. ``force``: replace existing files; without it, an existing file raises
        ``Refused``, and nothing is written. ``everything``: include the unchanged files of the job's code. ``bar``: called with
        the total number of bytes; returns a context manager, whose function is called with the bytes of each block.

        ``notes`` of the result report what was left out, such as links. Raises ``NotFound`` if there is no ``path``, or no
        working directory yet.

        >>> client.fetch_files(job_id, directory / "outputs").files
        []
        """
        params = {"path": path or None, "all": "true" if everything else None}
        return fetch_files(self._transport, self._path(job, "files", "archive"), params, Path(target), force, bar)

    # --- queue and quotas ---------------------------------------------------------------------------------------------

    def queue(self, limit: int = 50) -> list[api_queue.QueuedView]:
        """Return the first ``limit`` (maximum 5000) queued jobs of all owners, in the order in which they start, without those in
        back-off.

        >>> [one.position for one in client.queue()] in ([], [1])
        True
        """
        return list(islice(self._pages("/v1/queue", api_queue.QueuedView, {"limit": min(limit, 100)}), limit))

    def queue_view(self, limit: int = 50, job: str | Job | None = None) -> api_queue.QueueView:
        """Return one page with at most ``limit`` (maximum 100) queued jobs, without those in back-off, and their total number.
        With ``job``: a page with only this job; empty if the job is not queued."""
        params: Params = {"limit": limit} if job is None else {"job_id": self.job_id(job)}
        return self._get("/v1/queue", api_queue.QueueView, params)

    def quotas(self) -> Iterator[api_quotas.QuotaView]:
        """Yield all quotas that are set, each with the current usage of its owner; the quota of ``*`` has no usage."""
        return self._pages("/v1/quotas", api_quotas.QuotaView, {})

    def quota(self, owner: str) -> api_quotas.QuotaView:
        """Return the quota that applies to ``owner``, with the current usage (none for ``*``): the owner's own quota, else that
        of ``*``, else one without limits.

        >>> client.quota("local").in_use.jobs >= 0
        True
        """
        return self._get(quota_path(owner), api_quotas.QuotaView)

    def set_quota(self, owner: str, request: api_quotas.QuotaRequest) -> api_quotas.QuotaView:
        """Replace the quota of ``owner``, and return the new quota. ``*`` stands for every owner without an own quota. A limit
        that ``request`` omits is removed."""
        body = request.model_dump(mode="json")
        return api_quotas.QuotaView.model_validate(self._transport.request("PUT", quota_path(owner), json=body).json())

    def delete_quota(self, owner: str) -> None:
        """Delete the quota of an owner; after that the quota of ``*`` applies, if it is set. Raises ``NotFound``."""
        self._transport.request("DELETE", quota_path(owner))

    def usage(self, *, since: str | None = None, until: str | None = None, by: str = "owner") -> api_usage.UsageView:
        """Return the hours of GPUs, CPU slots and ranks that attempts have used from ``since`` (default: 30 days before
        ``until``) to ``until`` (default: now), which are RFC 3339 times with a time zone, at most 366 days apart. ``by``:
        ``owner``, or ``label:KEY`` for the values of a label. The hours of deleted jobs are not included.

        >>> client.usage().items[0].attempts > 0
        True
        """
        return self._get("/v1/usage", api_usage.UsageView, {"since": since, "until": until, "by": by})

    def usage_csv(self, *, since: str | None = None, until: str | None = None, by: str = "owner") -> str:
        """Return the figures of ``usage``, for the same ``since``, ``until`` and ``by``, as CSV with a header. A value that
        begins like a formula has a ``'`` in front."""
        params: Params = {"since": since, "until": until, "by": by}
        with self._transport.stream("/v1/usage", params, {"Accept": "text/csv"}) as response:
            return response.read().decode()

    # --- the service --------------------------------------------------------------------------------------------------

    def hooks(self) -> list[views.HookInfo]:
        """Return all known hooks, with their parameters.

        >>> [hook.name for hook in client.hooks() if hook.available][:3]
        ['allreduce', 'fp16_compress', 'bf16_compress']
        """
        return list(self._pages("/v1/hooks", views.HookInfo, {}))

    def hook_info(self, name: str) -> views.HookInfo:
        """Return the hook ``name``, with its parameters as a JSON schema. Raises ``NotFound``."""
        return self._get(f"/v1/hooks/{quote(name, safe='')}", views.HookInfo)

    def ready(self) -> bool:
        """Return True if the service reports that it is ready, and False if it is not or does not respond. May retry for
        ``retry_for`` seconds."""
        try:
            self._transport.request("GET", "/readyz")
        except (ServiceUnreachable, ServiceFault):
            return False
        return True

    def _act(self, job: str | Job, action: str, body: BaseModel | None = None) -> views.JobView:
        """Send the action to the job, with the set fields of ``body``, and return the job as in the response."""
        data = None if body is None else body.model_dump(mode="json", exclude_unset=True)
        return self._post(self._path(job, action), views.JobView, json=data)


def _absolute(path: str | os.PathLike[str] | None) -> str | None:
    """Return ``path`` as an absolute path with ``~`` expanded; None for None."""
    return None if path is None else str(Path(path).expanduser().absolute())
