"""A job's checkpoints in an object store, below ``<uri>/<job id>/checkpoints/``. A checkpoint counts only with its manifest,
which is uploaded last and deleted first."""

from __future__ import annotations

import xxhash

from ratchet_contract.checkpoint.manifest import FileEntry, Manifest, open_manifest
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, parse_checkpoint_dir_name
from ratchet_store.filesystem.durable_io import DAMAGED, EXISTS, MISSING
from ratchet_store.format.manifest_file import MAX_MANIFEST_BYTES
from ratchet_store.format.manifest_structure import check_structure
from ratchet_store.format.safetensors_header import refuse_json_bomb
from ratchet_store.object_store.client import ObjectStore, Patience, open_store

Id = tuple[int, int]
QUARANTINED_MANIFEST = "MANIFEST.json.quarantined"


def job_prefix(job_id: str) -> str:
    """Return the prefix of a job's checkpoints below its ``checkpoint.uri``."""
    return f"{job_id}/checkpoints"


def open_job_checkpoints(uri: str, job_id: str, patience: Patience = Patience()) -> RemoteCheckpoints:
    """Return access to a job's checkpoints in the store of ``uri``. No request is sent yet. Raises as ``open_store`` does."""
    return RemoteCheckpoints(open_store(uri, job_prefix(job_id), patience), job_id)


def digest_of(entry: FileEntry) -> str:
    """Return one digest of a rank file: XXH3-128 in hex over its size, its block size and its block digests."""
    size, blocks = entry.block_size, entry.blocks
    return xxhash.xxh3_128_hexdigest(f"{entry.size}/{size}/{','.join(blocks)}".encode())


class RemoteCheckpoints:
    """A job's checkpoints in an object store. ``folder`` is a checkpoint's directory name, such as ``step-000000001200.a0007``.
    Methods raise ``CheckpointError``."""

    def __init__(self, objects: ObjectStore, job_id: str) -> None:
        self.objects = objects
        self.job_id = job_id

    def list_checkpoints(self) -> dict[Id, dict[str, int]]:
        """Return the objects of every checkpoint in the store, complete or not: their sizes in bytes, by checkpoint and object
        name. The newest checkpoint is first."""
        found: dict[Id, dict[str, int]] = {}
        for path, size in self.objects.list().items():
            folder, _, name = path.partition("/")
            parsed = parse_checkpoint_dir_name(folder)
            if parsed is not None and name and "/" not in name:
                found.setdefault(parsed, {})[name] = size
        return dict(sorted(found.items(), reverse=True))

    def manifest(self, folder: str) -> Manifest:
        """Return the checked manifest of a checkpoint. Raises ``CheckpointError``: ``checkpoint-missing``,
        ``checkpoint-damaged``, ``checkpoint-format``, ``checkpoint-remote``, ``checkpoint-remote-denied``."""
        return self.parse(folder, self.raw_manifest(folder))

    def raw_manifest(self, folder: str) -> bytes:
        """Return the bytes of a checkpoint's manifest, unchecked. Raises ``CheckpointError`` (``checkpoint-missing``) if there is
        none."""
        return self.objects.get(f"{folder}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES)

    def parse(self, folder: str, raw: bytes) -> Manifest:
        """Parse a manifest, and check that it is intact and of this job and ``folder``. Raises ``checkpoint-damaged`` or
        ``checkpoint-format``."""
        try:
            refuse_json_bomb(raw)
            manifest = open_manifest(raw)
            if manifest.id != folder or manifest.job_id != self.job_id:
                text = f"the manifest is of {manifest.job_id}/{manifest.id}, not of {self.job_id}/{folder}"
                raise CheckpointError(text)
            check_structure(manifest)
        except CheckpointError as error:
            text = f"{self.objects.url}/{folder}/{MANIFEST_NAME}: {error.detail}"
            raise CheckpointError(text, code=error.code) from None
        return manifest

    def commit(self, folder: str, raw: bytes, digest: str) -> None:
        """Put the manifest ``raw``, whose digest is ``digest``, into the store; this is the last step of an upload. Does
        nothing if the store has this manifest already. Raises ``CheckpointError`` if the store has another one."""
        if self.objects.put_if_absent(f"{folder}/{MANIFEST_NAME}", raw):
            return
        there = self.manifest(folder)
        if there.digest != digest:
            raise CheckpointError(
                f"{self.objects.url}/{folder} holds another checkpoint, with digest {there.digest}: it is not replaced. "
                "Another run directory may have used the same checkpoint.uri: give this job one of its own",
                code=EXISTS,
            )

    def remove(self, folder: str, names: list[str] | None = None) -> None:
        """Delete a checkpoint's objects, the manifest first. ``names``: its objects; None: they are listed."""
        if names is None:
            names = [path.rpartition("/")[2] for path in self.objects.list(f"{folder}/")]
        if MANIFEST_NAME in names:
            self.objects.delete([f"{folder}/{MANIFEST_NAME}"])
        self.objects.delete(f"{folder}/{name}" for name in names if name != MANIFEST_NAME)

    def quarantine(self, folder: str) -> None:
        """Replace a damaged checkpoint's manifest in the store by ``QUARANTINED_MANIFEST``, so that the checkpoint no longer
        counts. Its data stay."""
        try:
            raw = self.raw_manifest(folder)
        except CheckpointError as error:
            if error.code not in (MISSING, DAMAGED):
                raise
            raw = b""
        self.objects.put_if_absent(f"{folder}/{QUARANTINED_MANIFEST}", raw)
        self.objects.delete([f"{folder}/{MANIFEST_NAME}"])

    def remove_all(self) -> None:
        """Delete everything below the job's prefix, manifests first, also quarantined data. The job must not run."""
        assert self.job_id, "a prefix of its own"
        names = list(self.objects.list())
        manifests = [name for name in names if name.endswith(f"/{MANIFEST_NAME}")]
        self.objects.delete(manifests)
        self.objects.delete(name for name in names if not name.endswith(f"/{MANIFEST_NAME}"))


def is_complete(manifest: Manifest, sizes: dict[str, int]) -> bool:
    """True if ``sizes`` (by object name) contains all rank files of the manifest, with their sizes."""
    return all(sizes.get(entry.name) == entry.size for entry in manifest.files)
