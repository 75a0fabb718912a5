"""The service's own operations on copies in an object store: fetch one to this disk, and delete those of a job."""

from __future__ import annotations

from typing import Final

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, HomePaths
from ratchet_service.db.models import Checkpoint, Job
from ratchet_service.isolation.file_access import as_owner, as_service
from ratchet_store.filesystem.durable_io import MISSING
from ratchet_store.object_store.client import BRIEF, Found, ObjectStore, Patience
from ratchet_store.object_store.download import fetch
from ratchet_store.object_store.remote_checkpoints import RemoteCheckpoints, open_job_checkpoints

_PATIENCE: Final = Patience(connect=5.0, request=60.0, retry=10.0)


def ensure_local(homes: HomePaths, job: Job, row: Checkpoint) -> None:
    """Fetch the checkpoint from the object store if it is committed and only the object store has it; then it can be verified,
    exported and forked from. In any other case, and if the object store lacks it, too, nothing is done. Blocks until the download
    has ended; must not be called within a transaction. Raises ``CheckpointError`` (``checkpoint-remote``, ``-remote-denied``,
    ``-damaged``, ``-not-written``)."""
    uri, paths = job.spec["checkpoint"].get("uri"), homes.job(job.id)
    directory = paths.checkpoint(row.step, row.attempt)
    if uri is None or row.state != "committed" or row.uploaded_at is None or (directory / MANIFEST_NAME).exists():
        return
    try:
        remote = RemoteCheckpoints(_ByService(open_job_checkpoints(uri, job.id, _PATIENCE).objects), job.id)
        with as_owner(paths.root):
            fetch(remote, row.name, paths.checkpoints, paths.quarantine)
    except CheckpointError as error:
        if error.code == MISSING:  # gone there, too: the caller finds nothing on the disk, and reports it
            return
        text = f"checkpoint {row.name} is no longer on this disk, and its copy cannot be fetched: {error.detail}"
        raise CheckpointError(text, code=error.code) from None


class _ByService(ObjectStore):
    """Makes each request to the object store with the service's rights, even if the thread's file accesses are made as the job's
    user. The store's client reads its credentials repeatedly, perhaps from files that the job's user may not read, also in
    threads that it starts."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.url = inner.url

    def get_range(self, name: str, begin: int, end: int) -> memoryview:
        """As ``ObjectStore.get_range``."""
        with as_service():
            return self._inner.get_range(name, begin, end)

    def head(self, name: str) -> Found:
        """As ``ObjectStore.head``."""
        with as_service():
            return self._inner.head(name)

    def list(self, prefix: str = "") -> dict[str, int]:
        """As ``ObjectStore.list``."""
        with as_service():
            return self._inner.list(prefix)


def remove(uri: str, job_id: str) -> str | None:
    """Delete all copies of the job's checkpoints in the object store. Return None if all were deleted, else a sentence that says
    why not. Errors are not raised."""
    try:
        remote = open_job_checkpoints(uri, job_id, BRIEF)
        remote.remove_all()
    except (CheckpointError, ValueError) as error:
        return f"{uri}/{job_id} was not deleted: {getattr(error, 'detail', error)}; tried again when the service starts"
    return None
