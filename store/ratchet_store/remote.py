"""A job's checkpoints in an object store: ``<uri>/<job id>/checkpoints/<checkpoint>/``, the same names as on the disk.

Data objects come first, the manifest last and only if none is there; it goes first when a copy is taken away. Names hold the
epoch, so nobody but the attempts that share a committed checkpoint's very bytes ever writes the same object.
"""

from __future__ import annotations

import xxhash

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import FileEntry, Manifest, open_manifest
from ratchet_contract.paths import MANIFEST_NAME, is_job_id, parse_checkpoint_dir_name
from ratchet_store.commit import MAX_MANIFEST
from ratchet_store.files import DAMAGED, EXISTS, MISSING
from ratchet_store.header import refuse_json_bomb
from ratchet_store.objects import ObjectStore, Patience, open_store
from ratchet_store.structure import check_structure

Id = tuple[int, int]
QUARANTINED_MANIFEST = "MANIFEST.json.quarantined"


def below(job_id: str) -> str:
    """Where a job's checkpoints lie below its ``checkpoint.uri``."""
    return f"{job_id}/checkpoints"


def open_job(uri: str, job_id: str, patience: Patience = Patience()) -> RemoteCheckpoints:
    """Raises as ``open_store`` does."""
    return RemoteCheckpoints(open_store(uri, below(job_id), patience), job_id)


def digest_of(entry: FileEntry) -> str:
    """One digest of a rank file out of those of its blocks: XXH3-128 of their list."""
    size, blocks = entry.block_size, entry.blocks
    return xxhash.xxh3_128_hexdigest(f"{entry.size}/{size}/{','.join(blocks)}".encode())


class RemoteCheckpoints:
    """What lies there now; nothing is remembered. Every method raises ``CheckpointError``."""

    def __init__(self, objects: ObjectStore, job_id: str) -> None:
        self.objects = objects
        self.job_id = job_id

    def listing(self) -> dict[Id, dict[str, int]]:
        """Sizes of objects by name, of everything named like a checkpoint, newest step and epoch first."""
        found: dict[Id, dict[str, int]] = {}
        for path, size in self.objects.list().items():
            folder, _, name = path.partition("/")
            parsed = parse_checkpoint_dir_name(folder)
            if parsed is not None and name and "/" not in name:
                found.setdefault(parsed, {})[name] = size
        return dict(sorted(found.items(), reverse=True))

    def manifest(self, folder: str) -> Manifest:
        """Of the checkpoint named ``folder``. Raises ``checkpoint-missing``, ``-damaged``, ``-newer``, ``-remote``."""
        return self.parse(folder, self.raw_manifest(folder))

    def raw_manifest(self, folder: str) -> bytes:
        return self.objects.get(f"{folder}/{MANIFEST_NAME}", MAX_MANIFEST)

    def parse(self, folder: str, raw: bytes) -> Manifest:
        """Check what a manifest claims to be."""
        try:
            refuse_json_bomb(raw)
            manifest = open_manifest(raw)
            if manifest.id != folder or manifest.job_id != self.job_id:
                text = f"the manifest is of {manifest.job_id}/{manifest.id}, not of {self.job_id}/{folder}"
                raise CheckpointError(text)
            check_structure(manifest)
        except CheckpointError as error:
            text = f"{self.objects.where}/{folder}/{MANIFEST_NAME}: {error.detail}"
            raise CheckpointError(text, code=error.code) from None
        return manifest

    def commit(self, folder: str, raw: bytes, digest: str) -> None:
        """The last step of an upload. Raises ``checkpoint-exists`` when another manifest is there."""
        if self.objects.put_if_absent(f"{folder}/{MANIFEST_NAME}", raw):
            return
        there = self.manifest(folder)
        if there.digest != digest:
            raise CheckpointError(
                f"{self.objects.where}/{folder} holds another checkpoint, with digest {there.digest}: it is not replaced. "
                "Another run directory may have used the same checkpoint.uri: give this job one of its own",
                code=EXISTS,
            )

    def remove(self, folder: str, names: list[str] | None = None) -> None:
        """The manifest first: from then on it is no checkpoint. ``names``: those known to be there; None: they are asked for."""
        if names is None:
            names = [path.rpartition("/")[2] for path in self.objects.list(f"{folder}/")]
        if MANIFEST_NAME in names:
            self.objects.delete([f"{folder}/{MANIFEST_NAME}"])
        self.objects.delete(f"{folder}/{name}" for name in names if name != MANIFEST_NAME)

    def set_aside(self, folder: str) -> None:
        """Damaged: it counts no more, under another name of its manifest, and what is there stays to be looked at."""
        try:
            raw = self.raw_manifest(folder)
        except CheckpointError as error:
            if error.code not in (MISSING, DAMAGED):
                raise
            raw = b""
        self.objects.put_if_absent(f"{folder}/{QUARANTINED_MANIFEST}", raw)
        self.objects.delete([f"{folder}/{MANIFEST_NAME}"])

    def remove_all(self) -> None:
        """Everything below the job's prefix; manifests first. The job must not run."""
        assert is_job_id(self.job_id) or self.job_id, "a prefix of its own"
        names = list(self.objects.list())
        manifests = [name for name in names if name.endswith(f"/{MANIFEST_NAME}")]
        self.objects.delete(manifests)
        self.objects.delete(name for name in names if not name.endswith(f"/{MANIFEST_NAME}"))


def is_whole(manifest: Manifest, sizes: dict[str, int]) -> bool:
    """Are all its files there, with their sizes?"""
    return all(sizes.get(entry.name) == entry.size for entry in manifest.files)
