"""What the service itself does with copies in an object store: bring one back to this disk, and delete a job's."""

from __future__ import annotations

from typing import Final

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, HomePaths
from ratchet_service.file_owner import as_owner, as_service
from ratchet_service.models import Checkpoint, Job
from ratchet_store.fetch import fetch
from ratchet_store.files import MISSING
from ratchet_store.objects import BRIEF, Found, ObjectStore, Patience
from ratchet_store.remote import RemoteCheckpoints, open_job

_PATIENCE: Final = Patience(connect=5.0, request=60.0, retry=10.0)


def provide(homes: HomePaths, job: Job, row: Checkpoint) -> None:
    """A committed checkpoint that only the object store has is fetched, so that it can be verified, exported and forked
    from. Not within a transaction. Raises ``CheckpointError`` (``checkpoint-remote``, ``-remote-denied``, ``-damaged``,
    ``-not-written``)."""
    uri, paths = job.spec["checkpoint"].get("uri"), homes.job(job.id)
    directory = paths.checkpoint(row.step, row.epoch)
    if uri is None or row.state != "committed" or row.uploaded_at is None or (directory / MANIFEST_NAME).exists():
        return
    try:
        remote = RemoteCheckpoints(_ByService(open_job(uri, job.id, _PATIENCE).objects), job.id)
        with as_owner(paths.root):
            fetch(remote, row.name, paths.checkpoints, paths.quarantine)
    except CheckpointError as error:
        if error.code == MISSING:  # gone there, too: who asked finds nothing on the disk, and says so
            return
        text = f"checkpoint {row.name} is not on this disk any more, and its copy cannot be fetched: {error.detail}"
        raise CheckpointError(text, code=error.code) from None


class _ByService(ObjectStore):
    """Requests by the service's rights, whoever writes what comes: the client reads its credentials again and again, perhaps
    from files that the job's user may not read, and what threads it starts, later requests use, too."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.where = inner.where

    def get_range(self, name: str, begin: int, end: int) -> memoryview:
        with as_service():
            return self._inner.get_range(name, begin, end)

    def head(self, name: str) -> Found:
        with as_service():
            return self._inner.head(name)

    def list(self, prefix: str = "") -> dict[str, int]:
        with as_service():
            return self._inner.list(prefix)


def remove(uri: str, job_id: str) -> str | None:
    """Delete all of a job's copies; what is left, and why, in a sentence."""
    try:
        remote = open_job(uri, job_id, BRIEF)
        remote.remove_all()
    except (CheckpointError, ValueError) as error:
        return f"{uri}/{job_id} was not deleted: {getattr(error, 'detail', error)}; tried again when the service starts"
    return None
