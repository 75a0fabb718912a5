"""The manifest, whose rename into place completes a checkpoint. No manifest, no checkpoint.

Tensor names are ``shared/<name>`` (equal on all ranks, cut into slices over them) or ``rank/<r>/<name>`` (private). A rank file
is a safetensors file with that rank's JSON state in its metadata. Digests: XXH3-128 of each block of a rank file; SHA-256 of the
manifest's canonical JSON without ``digest``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ratchet_contract.checkpoint.resume_report import Base, rename_epoch
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import checkpoint_dir_name
from ratchet_hooks.summary import HookSummary

FORMAT_VERSION: Final = 2
MIN_BLOCK: Final = 4096
"""Bytes. Smaller blocks would have more digests than data."""
STATE_METADATA_KEY: Final = "state"
SHARED_PREFIX: Final = "shared/"
RANK_PREFIX: Final = "rank/"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Model):
    """One rank file of a checkpoint: its size in bytes, and the digests of its blocks."""

    name: str
    rank: int
    size: int = Field(ge=0)
    block_size: int = Field(ge=MIN_BLOCK, description="Bytes of every block but the last, which may be shorter.")
    blocks: list[str] = Field(
        [], description="XXH3-128, in hex, of each block; every byte of the file lies in exactly one, its header's too."
    )


class TensorEntry(_Model):
    """One stored piece of a tensor. ``file``: name of the rank file; ``offset``: bytes from the file's start; ``shape``: of
    the whole tensor; ``start``: index (row-major) of the first element in this piece; ``dtype``: safetensors' name. A private
    tensor is always one piece."""

    name: str
    file: str
    offset: int = Field(ge=0)
    nbytes: int = Field(ge=0)
    shape: list[int]
    dtype: str
    start: int = 0


HOOK_SUMMARY: Final = TypeAdapter(HookSummary)
"""Converts one rank's hook summary to and from JSON."""


class HookRecord(_Model):
    """The hook that made the state: its name and parameters as in the spec, and the version of the state's format."""

    name: str
    parameters: dict[str, Any]
    state_version: int


class Manifest(_Model):
    format_version: int = FORMAT_VERSION
    job_id: str
    step: int = Field(ge=0)
    attempt: int = Field(ge=1)
    parent: Base
    world_size: int = Field(ge=1)
    created: str
    reason: Literal["schedule", "stop", "request", "end", "first", "memory"]
    spec_digest: str
    code_digest: str | None = None
    data_digest: str | None = None
    replicas: Literal["equal", "subgroup", "rank"]
    shared_digests: list[str] = Field(
        [],
        description="The shared tensors' bytes in as many parts, cut as plan_slices cuts them. Of each part the "
        "XXH3-128, in hex, of the text that the XXH3-128 in hex of its slices make one after the other, of what the rank that "
        "writes the part has; other ranks agreed as far as they compared.",
    )
    bucket_layout: list[list[str]] | None = Field(
        None, description="Parameter names per bucket, as DDP hands them to the hook."
    )
    hook: HookRecord
    hook_summaries: list[HookSummary] = []
    environment: dict[str, str | int | float | bool | None] = {}
    total_steps: int | None = Field(None, description="Total number of steps of the job; None: only its script knows.")
    finished: bool = Field(False, description="True for the final checkpoint of a job that ran to its end.")
    files: list[FileEntry]
    tensors: list[TensorEntry]
    digest: str = ""

    @property
    def id(self) -> str:
        """Name of the checkpoint's directory, which is its id in the API."""
        return checkpoint_dir_name(self.step, self.attempt)

    @property
    def base(self) -> Base:
        """This checkpoint, as the base of a later attempt."""
        return Base(step=self.step, attempt=self.attempt, digest=self.digest)

    @property
    def size(self) -> int:
        """Bytes of all rank files."""
        return sum(f.size for f in self.files)


_ENTRIES: Final = TypeAdapter(list[TensorEntry])


def dump_entries(entries: Sequence[TensorEntry]) -> str:
    """Return a list of tensors as JSON text."""
    return _ENTRIES.dump_json(list(entries)).decode()


def parse_entries(text: bytes | str) -> list[TensorEntry]:
    """Return the list of tensors in a JSON text of ``dump_entries``. Raises ``ValidationError``."""
    return _ENTRIES.validate_json(text)


def same_entries(one: Sequence[TensorEntry], other: Sequence[TensorEntry]) -> bool:
    """Return True if both lists contain the same objects in the same order; equal copies do not count."""
    return len(one) == len(other) and all(map(is_, one, other))


class _Rendered(NamedTuple):
    """The value of a manifest's key as text. ``canonical``: for the digest; ``lines``: for the file."""

    canonical: bytes
    lines: bytes


class Sealer:
    """Computes digests and file contents of manifests. Keeps the text of values that seldom change, such as tensor lists."""

    def __init__(self) -> None:
        self._tensors: tuple[TensorEntry, ...] = ()
        self._stable_json = ""
        self._rendered = {"tensors": _Rendered(b"[]", b"[]")}

    def seal(self, manifest: Manifest) -> tuple[Manifest, bytes]:
        """Return a copy of the manifest with its digest, and the bytes of the manifest's file. The digest and the file have null
        in place of NaN and infinities; hook summaries have strings instead."""
        if not same_entries(manifest.tensors, self._tensors):
            self._rendered["tensors"] = _render(json.loads(_ENTRIES.dump_json(manifest.tensors)))
            self._tensors = tuple(manifest.tensors)
        settled = manifest.model_dump_json(include=_STABLE_KEYS)
        if settled != self._stable_json:
            self._rendered |= {key: _render(value) for key, value in json.loads(settled).items()}
            self._stable_json = settled
        # Not ``model_dump``: it would keep NaN, which is not valid JSON. The keys are in the order of the fields.
        rest = json.loads(manifest.model_dump_json(exclude={"tensors", *_STABLE_KEYS}))
        data = {key: rest.get(key) for key in type(manifest).model_fields}
        data["digest"] = digest = _digest(data, self._rendered)
        return manifest.model_copy(update={"digest": digest}), _lines(data, self._rendered)


def _render(value: Any) -> _Rendered:
    """Return ``value`` as text for the digest, and as text for the manifest's file."""
    return _Rendered(_canonical_text(value), _lines_text(value))


_STABLE_KEYS: Final = {
    "format_version", "job_id", "attempt", "world_size", "spec_digest", "code_digest", "data_digest", "replicas", "bucket_layout",
    "hook", "environment", "total_steps",
}  # fmt: skip
"""Keys whose values seldom change from one manifest to the next."""


_NOTHING: Final[Mapping[str, _Rendered]] = {}
_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_LINES: Final = json.JSONEncoder(allow_nan=False)


def _digest(data: dict[str, Any], rendered: Mapping[str, _Rendered] = _NOTHING) -> str:
    """Return the SHA-256 in hex of the canonical JSON of ``data`` without ``digest``. ``rendered``: the texts of values that have
    already been encoded, by key."""
    hasher, comma = hashlib.sha256(b"{"), b""
    for key in sorted(data):
        if key != "digest":
            hasher.update(comma + _encoded_key(key, _canonical_text) + b":")
            hasher.update(rendered[key].canonical if key in rendered else _canonical_text(data[key]))
            comma = b","
    hasher.update(b"}")
    return hasher.hexdigest()


@lru_cache(maxsize=128)
def _encoded_key(key: str, encode: Callable[[Any], bytes]) -> bytes:
    """Return a key of a manifest as the text that ``encode`` makes of it. Results are cached, since every manifest has the same
    keys."""
    return encode(key)


def _canonical_text(value: Any) -> bytes:
    return _CANONICAL.encode(value).encode()


def _lines(data: dict[str, Any], rendered: Mapping[str, _Rendered]) -> bytes:
    """Return the bytes of a manifest's file: a line per key, and in a list of objects a line per object. ``rendered``: the texts
    of values that have already been encoded, by key."""
    parts, comma = [b"{\n"], b""
    for key, value in data.items():
        parts.append(comma + b" " + _encoded_key(key, _lines_text) + b": ")
        parts.append(rendered[key].lines if key in rendered else _lines_text(value))
        comma = b",\n"
    return b"".join([*parts, b"\n}"])


def _lines_text(value: Any) -> bytes:
    """Return a value as text; a list of objects has a line per object."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ("[\n  " + ",\n  ".join(_LINES.encode(item) for item in value) + "\n ]").encode()
    return _LINES.encode(value).encode()


def open_manifest(raw: bytes) -> Manifest:
    """Parse the bytes of a manifest, check its digest and return it. Raises ``CheckpointError``: ``checkpoint-damaged`` (torn,
    altered, malformed), or ``checkpoint-format`` for another format version."""
    try:
        data = json.loads(raw)
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"manifest is not valid JSON: {error}") from None
    try:
        digest = _digest(data)
    except (ValueError, RecursionError) as error:  # NaN, lone surrogates, depth: json.loads accepts them
        raise CheckpointError(f"manifest is not valid JSON: {error}") from None
    if digest != data.get("digest"):
        raise CheckpointError("manifest does not match its own digest: it was altered or written incompletely")
    version = data.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        raise CheckpointError(
            f"manifest has format version {version!r}, this Ratchet reads {FORMAT_VERSION}: use the version that wrote it",
            code="checkpoint-format",
        )
    try:
        return Manifest.model_validate(rename_epoch(data))
    except ValidationError as error:
        raise CheckpointError(
            f"manifest is malformed: {error.errors()[0]['msg']} at {error.errors()[0]['loc']}"
        ) from None
