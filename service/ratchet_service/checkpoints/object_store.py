"""The service's operations on copies in an object store: fetch one to this disk, and delete those of a job."""

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
    """Fetch a committed checkpoint from the object store if it is no longer on this disk. Does nothing if the object store has no
    copy either. Blocks; must not be called within a transaction. Raises ``CheckpointError``."""
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
    """Makes requests to the object store with the service's rights, even if the thread accesses files as the job's user."""

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
    """Delete all copies of the job's checkpoints in the object store. Return None, or a sentence that says why not."""
    try:
        remote = open_job_checkpoints(uri, job_id, BRIEF)
        remote.remove_all()
    except (CheckpointError, ValueError) as error:
        return f"{uri}/{job_id} was not deleted: {getattr(error, 'detail', error)}; tried again when the service starts"
    return None
