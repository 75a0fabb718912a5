"""``RatchetClient``: the REST API as typed Python calls. Synchronous; safe to use from one thread at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from pydantic import BaseModel

from ratchet_client.http.errors import ServiceFault, ServiceUnreachable
from ratchet_client.http.transport import Params, Transport
from ratchet_client.resources.code_upload import Note, with_code
from ratchet_client.resources.export_download import ExportFormat, fetch
from ratchet_client.resources.follow import Following
from ratchet_client.resources.job import Job
from ratchet_client.resources.job_files import Bar, Fetched, no_progress
from ratchet_client.resources.job_files import fetch as fetch_files
from ratchet_client.resources.poll import TERMINAL, Series, Snapshot, WhichAttempt
from ratchet_client.resources.requests import PAGE, quota_path
from ratchet_client.resources.spec_file import Spec, spec_body
from ratchet_client.resources.tokens import Access
from ratchet_contract.api import queue as api_queue
from ratchet_contract.api import quotas as api_quotas
from ratchet_contract.api import requests, views

__all__ = ["TERMINAL", "Job", "RatchetClient", "Series", "Snapshot", "WhichAttempt"]


class RatchetClient(Following, Access):
    """A client of one service. It finds the service in the same way as the command line.

    ``base_url``: the service's address. ``home``: the run directory whose ``service.json`` has the address. If neither is given,
    the first of these applies: ``RATCHET_SERVER``, ``RATCHET_HOME``, the configuration file's server, ``./.ratchet`` if it
    exists, this user's only running service. If only ``service.json`` has the address, the client reads it at each request, so it
    finds a restarted service. ``token``: sent as bearer token, but not to another machine's address from ``service.json``.
    Default: ``RATCHET_TOKEN``, else the configuration file's ``token``, which is sent only to the file's ``token_server``.
    ``timeout``: seconds without a byte after which one request fails; downloads and streams have longer limits of their own.
    ``retry_for``: seconds for which one call is retried if the service does not respond, is not ready or is busy. ``export``,
    ``fetch_files`` and ``read_file`` are not retried.

    Methods can raise the errors of ``ratchet_contract.errors`` and ``ratchet_client.errors``. Methods that return an iterator
    read the list page by page while it is consumed. Retries are safe. A POST is sent again with the same Idempotency-Key, so that
    it takes effect once. A PATCH only sets values. A DELETE is sent again only if the first one cannot have arrived.

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
        waiting for its start. Raises ``SpecError`` with the invalid fields (at most 50).

        Relative paths in the spec are relative to the file's directory. Without a file, they are relative to the current
        directory. For a day by default, the same ``idempotency_key`` with the same spec returns the same job again, with its
        first state; with another spec, ``Refused`` is raised.

        ``adopt``: a directory on the service's machine, where the spec's script has run without a service. A relative path is
        made absolute with this process's current directory. The job continues from a copy of this run's newest checkpoint; the
        directory is not changed.

        ``upload``: True: upload the directory ``code.path`` of this machine first. False: ``code.path`` is a directory of the
        service's machine. None: upload the directory if it exists here and the service's address belongs to another machine. A
        directory that the service already has is not uploaded again. ``note``: a function that receives sentences about files
        that are left out of the upload, about large files in it, and about the progress of a large upload. Without ``note``, a
        ``UserWarning`` reports the left-out and the large files.

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
        """Return the job with this id or name, with its current state. If several jobs have the name, return the one that has not
        ended. Raises ``AmbiguousName`` if that is not exactly one job, and ``NotFound`` if no job has the id or name.

        >>> client.job(job_id).phase.value
        'SUCCEEDED'
        """
        return Job(self, self.view(job))

    def plan(self, spec: Spec, *, adopt: str | os.PathLike[str] | None = None, upload: bool | None = None,
             note: Note | None = None) -> views.PlanView:  # fmt: skip
        """Check ``spec`` as ``submit`` does, including ``adopt`` but not the owner's quota, and return what would run. No job is
        stored. Code is uploaded as by ``submit``, and the service keeps it for ten minutes.

        >>> client.plan("examples/digits-powersgd.yaml").resolved.backend
        'gloo'
        """
        body = with_code(self._transport, spec_body(spec), upload, note)
        return self._post("/v1/jobs", views.PlanView, params={"dry_run": "true", "adopt": _absolute(adopt)}, json=body)

    def jobs(self, *, phase: Collection[str] = (), label: Mapping[str, str] | None = None, name: str | None = None,
             sort: str | None = None, owner: str | None = None, page_size: int = PAGE) -> Iterator[views.JobView]:  # fmt: skip
        """Yield all matching jobs, newest first. Pages are fetched while iterating. ``sort``: order by ``created``, ``name`` or
        ``priority`` instead; a ``-`` in front means descending. ``phase``: only jobs in one of these phases. ``label``: only jobs
        with all of these labels. ``name``, ``owner``: only jobs with this name, or of this owner.

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
        return self._pages("/v1/jobs", views.JobView, params)

    def suspend(self, job: str | Job) -> views.JobView:
        """Request that the job saves a checkpoint, stops, and stays stopped until ``resume``. Returns without waiting for the
        stop. A suspended job stays as it is; a queued one is suspended at once. A script without a Session is stopped without a
        checkpoint of Ratchet. Like all actions, raises ``Conflict`` in an unsuitable phase."""
        return self._act(job, "suspend")

    def resume(self, job: str | Job, from_step: int | None = None, *, world: int | None = None, nodes: int | None = None,
               hook: dict[str, Any] | str | None = None, on_hook_mismatch: str | None = None,
               code: str | os.PathLike[str] | None = None, include: Sequence[str] | None = None,
               upload: bool | None = None, note: Note | None = None) -> views.JobView:  # fmt: skip
        """Resume a suspended, failed or cancelled job. Return its new state without waiting for the training. Without further
        arguments the job continues from its newest checkpoint, with the same world, hook and code as before. A job that is queued
        or running then stays as it is.

        ``from_step``: the step of an older checkpoint to start from. ``world``: the new number of ranks per node. ``nodes``: with
        ``world``, the new number of nodes. ``hook``: the name of a new hook, or a mapping that is merged over the job's hook.
        ``on_hook_mismatch``: the job's policy from now on (fail, reset, redistribute). ``code``: a directory with new code; the
        job continues with a snapshot of it. ``include``: with ``code``, the job's ``code.include`` from now on. ``upload``,
        ``note``: as in ``submit``, for ``code``. The resume report describes what these changes did. Raises ``Conflict`` in an
        unsuitable phase, for a change while an attempt may be alive, for a change that the job's policy forbids, and beyond the
        owner's quota. Raises ``NotFound`` for a step without a checkpoint that the job can continue from, and ``SpecError`` for a
        change that is not valid.
        """
        if nodes is not None and world is None:
            raise ValueError("nodes requires world, the number of ranks per node")
        if include is not None and code is None:
            raise ValueError("include requires code, the directory with the new code")
        job = self.job_id(job)
        given: dict[str, Any] = {"from_step": from_step, "hook": hook, "on_hook_mismatch": on_hook_mismatch}
        if world is not None:
            given["world"] = requests.WorldChange(ranks_per_node=world, nodes=nodes)
        if code is not None:
            named = {"path": str(Path(code).expanduser().absolute())}
            if include is None:
                include = (self.view(job).spec.get("code") or {}).get("include", [])
            given["code"] = with_code(self._transport, {"code": {**named, "include": include}}, upload, note)["code"]
        request = requests.ResumeRequest.model_validate({k: v for k, v in given.items() if v is not None})
        return self._act(job, "resume", request)

    def cancel(self, job: str | Job) -> views.JobView:
        """Request that the job ends; a running attempt saves a checkpoint first. Returns without waiting for the end."""
        return self._act(job, "cancel")

    def preempt(self, job: str | Job) -> views.JobView:
        """Request that the running attempt saves a checkpoint and stops; the job is then queued again, unless that exceeds
        its ``max_preemptions``. Returns without waiting for the stop."""
        return self._act(job, "preempt")

    def checkpoint_now(self, job: str | Job) -> views.JobView:
        """Request that the running attempt saves a checkpoint at the next step on which its ranks agree. Returns before the
        checkpoint is written; training continues. Raises ``Conflict`` if no attempt starts or runs, and if the script is
        known to create no Session."""
        return self._act(job, "checkpoint")

    def fork(self, job: str | Job, request: requests.ForkRequest, *, upload: bool | None = None,
             note: Note | None = None) -> Job:  # fmt: skip
        """Create and return a new job that starts from a checkpoint of this job, with a changed spec. ``request`` has the id of
        the checkpoint (default: the newest), the new job's name, and the keys of the spec that change. The service pins this
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
        """Change labels and priority of the job as in ``request``. Fields and labels that ``request`` does not set stay
        unchanged; a label with the value None is removed. Returns the changed job.

        >>> client.patch(job_id, ratchet.PatchRequest(labels={"team": "vision"})).labels["team"]
        'vision'
        """
        body = request.model_dump(mode="json", exclude_unset=True)
        return views.JobView.model_validate(self._transport.request("PATCH", self._path(job), json=body).json())

    def delete(self, job: str | Job, *, keep_checkpoints: bool = False, outputs: bool = False) -> views.DeleteResult:
        """Delete an ended job and its logs. Its checkpoints are deleted, too, unless ``keep_checkpoints`` is true. The files that
        the job made in its working directory are kept, and the result has their path. ``outputs=True`` deletes these files too,
        also in a later call with the id of the deleted job. Raises ``Conflict`` if the job has not ended, or if a checkpoint that
        would be deleted is needed by a fork that has no checkpoint of its own yet."""
        params: Params = {
            "keep_checkpoints": "true" if keep_checkpoints else None,
            "outputs": "true" if outputs else None,
        }
        return views.DeleteResult.model_validate(
            self._transport.request("DELETE", self._path(job), params=params).json()
        )

    # --- attempts and checkpoints ----------------------------------------------------------------------------------------

    def attempts(self, job: str | Job) -> list[views.AttemptView]:
        """Return all attempts, oldest first.

        >>> newest = client.attempts(job_id)[-1]
        >>> newest.cause.value, newest.resume_report.verdict
        ('completed', 'fresh')
        """
        return list(self._job_pages(views.AttemptView, {"limit": PAGE}, job, "attempts"))[::-1]

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
        """Verify a checkpoint: the service reads every byte and compares it with the digests. Blocks until it is done. If the
        checkpoint is damaged, no exception is raised: ``verification`` of the result says so. The service moves a damaged
        checkpoint to the quarantine if no attempt can be using it; ``state`` of the result shows this. Raises ``Conflict`` if the
        checkpoint is in the quarantine or deleted already.

        >>> client.verify(job_id, client.job(job_id).last_checkpoint).verification
        'ok'
        """
        return self._post(self._path(job, "checkpoints", checkpoint_id, "verify"), views.VerifyResult)

    def compare(self, job: str | Job, with_job: str | Job, *, checkpoint: str | None = None,
                with_checkpoint: str | None = None) -> views.ComparisonView:  # fmt: skip
        """Compare every tensor and every rank's state of two jobs' checkpoints. By default, the steps at which both jobs have a
        committed checkpoint are compared, oldest first. The result is for the first step that differs, or for the newest step if
        all are equal. ``checkpoint`` (of ``job``) and ``with_checkpoint`` (of ``with_job``) select two checkpoints instead. If
        only one of them is given, the other job's checkpoint of the same step is used. Raises ``Conflict`` if there is no common
        step, or if a named checkpoint is in the quarantine or deleted.

        >>> client.compare(job_id, job_id).identical
        True
        """
        params: Params = {"checkpoint": checkpoint, "with_checkpoint": with_checkpoint}
        return self._get(self._path(job, "compare", self.job_id(with_job)), views.ComparisonView, params)

    def export(self, job: str | Job, checkpoint_id: str, target: str | os.PathLike[str], *,
               format: ExportFormat = "safetensors") -> list[str]:  # fmt: skip
        """Export a checkpoint to ``target``, as files for other programs. ``target`` must not exist. Blocks until all bytes have
        arrived and are verified. Returns notes for the reader of the files; an empty list if there are none. Raises ``Refused``
        if ``target`` exists or cannot be written.

        ``format``: ``safetensors``: one file, only the model. ``torch``: a directory with one file per rank, for ``torch.load``.
        ``dcp``: a directory for ``torch.distributed.checkpoint.load``.

        >>> client.export(job_id, client.job(job_id).last_checkpoint, directory / "model.safetensors")
        []
        """
        return fetch(self._transport, self._path(job, "checkpoints", checkpoint_id, "export"), format, Path(target))

    def pin(self, job: str | Job, checkpoint_id: str, pinned: bool = True) -> views.CheckpointView:
        """Pin a checkpoint, so that retention does not delete it. ``pinned=False`` removes the pin. Returns the changed
        checkpoint. Raises ``Conflict`` if the checkpoint is in the quarantine or deleted, or if its pin is to be removed and a
        fork has not started from it yet.

        >>> client.pin(job_id, client.job(job_id).last_checkpoint).pinned
        True
        """
        body = requests.PinRequest(pinned=pinned).model_dump(mode="json")
        return self._post(self._path(job, "checkpoints", checkpoint_id, "pin"), views.CheckpointView, json=body)

    def prune(self, job: str | Job, *, dry_run: bool = False, quarantined: bool = False) -> views.PruneResult:
        """Delete checkpoints from which no attempt will start, such as those of later steps after a resume from an earlier step.
        Also delete unfinished checkpoints. Pinned ones stay, and those of an attempt that may be alive. Returns what was
        deleted.

        ``dry_run``: only return what would be deleted. ``quarantined``: also delete damaged checkpoints that were quarantined,
        even pinned ones.

        >>> client.prune(job_id, dry_run=True).checkpoints
        []
        """
        body = requests.PruneRequest(dry_run=dry_run, quarantined=quarantined).model_dump(mode="json")
        return self._post(self._path(job, "checkpoints", "prune"), views.PruneResult, json=body)

    # --- files in a job's working directory ---------------------------------------------------------------------

    def files(self, job: str | Job, path: str = "", *, recursive: bool = True, everything: bool = False,
              page_size: int = 1000) -> Iterator[views.FileView]:  # fmt: skip
        """Yield the entries (files, directories, links) below ``path`` in the job's working directory, each directory before its
        contents; if ``path`` is a file, only this file. The directories and unchanged files of the job's code are left out;
        ``everything`` includes them. New files in such a directory are yielded. ``recursive=False``: only the direct entries of
        ``path``.

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
        file).

        If ``end`` is not after ``start``, the result is empty and no request is sent. Raises ``NotFound`` (``file-not-found``),
        and ``Refused`` with a code such as ``range-not-satisfiable`` (the file has no such bytes) or ``symbolic-link``.
        """
        if end is not None and end <= start:
            return b""
        ranged = {} if (start, end) == (0, None) else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        with self._transport.stream(self._path(job, "files", "content"), {"path": path}, ranged) as response:
            return response.read()

    def fetch_files(self, job: str | Job, target: str | os.PathLike[str], path: str = "", *, everything: bool = False,
                    force: bool = False, bar: Callable[[int], Bar] = no_progress) -> Fetched:  # fmt: skip
        """Download the file or directory ``path`` of the job's working directory into the directory ``target``, under its own
        name. Without ``path``, download the whole working directory. Blocks until all is written. Files are written only after
        everything has arrived. If a file exists already, the call writes nothing and raises ``Refused``; with ``force`` it
        replaces the file. ``everything``: include the unchanged files of the job's code. Links and unreadable files are left out,
        as ``notes`` of the result say. Raises ``NotFound`` for a missing ``path``, or if no attempt has created the working
        directory yet. ``bar``: opens a progress display, as ``job_files.fetch`` describes.

        >>> client.fetch_files(job_id, directory / "outputs").files
        []
        """
        params = {"path": path or None, "all": "true" if everything else None}
        return fetch_files(self._transport, self._path(job, "files", "archive"), params, Path(target), force, bar)

    # --- queue and quotas ---------------------------------------------------------------------------------------------

    def queue(self, limit: int = 50) -> list[api_queue.QueuedView]:
        """Return the first ``limit`` queued jobs of all owners, in the order in which they start, without those in back-off. Each
        item has the reason why the job waits, if it is known yet.

        >>> [one.position for one in client.queue()] in ([], [1])
        True
        """
        return list(islice(self._pages("/v1/queue", api_queue.QueuedView, {"limit": min(limit, 100)}), limit))

    def queue_view(self, limit: int = 50, job: str | Job | None = None) -> api_queue.QueueView:
        """Return one page with at most ``limit`` (maximum 100) queued jobs, without those in back-off. The page's ``waiting`` is
        the number of all such jobs. With ``job``, the page has only this job, with its place in the queue (None in back-off); the
        page is empty if the job is not queued."""
        params: Params = {"limit": limit} if job is None else {"job_id": self.job_id(job)}
        return self._get("/v1/queue", api_queue.QueueView, params)

    def quotas(self) -> Iterator[api_quotas.QuotaView]:
        """Yield all quotas that are set, each with the current usage of its owner; the quota of ``*`` has no usage."""
        return self._pages("/v1/quotas", api_quotas.QuotaView, {})

    def quota(self, owner: str) -> api_quotas.QuotaView:
        """Return the quota that applies to ``owner``, with the owner's current usage. This is the owner's own quota, else the
        quota of ``*``, else a quota without limits.

        >>> client.quota("local").in_use.jobs >= 0
        True
        """
        return self._get(quota_path(owner), api_quotas.QuotaView)

    def set_quota(self, owner: str, request: api_quotas.QuotaRequest) -> api_quotas.QuotaView:
        """Replace the quota of ``owner``, and return the new quota. The owner ``*`` stands for every owner without a quota of its
        own. A limit that ``request`` omits is removed. Running jobs are not stopped."""
        body = request.model_dump(mode="json")
        return api_quotas.QuotaView.model_validate(self._transport.request("PUT", quota_path(owner), json=body).json())

    def delete_quota(self, owner: str) -> None:
        """Delete the quota of an owner; after that the quota of ``*`` applies, if it is set. Raises ``NotFound``."""
        self._transport.request("DELETE", quota_path(owner))

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
        """Return True if the service reports that it is ready; its database then responds, too. Return False if the service does
        not respond or is not ready; before that, the request may be retried for ``retry_for`` seconds."""
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
