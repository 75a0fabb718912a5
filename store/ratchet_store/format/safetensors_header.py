"""The safetensors header of a rank file, with the rank's JSON state. A part of a tensor has the key ``<name>#<start>``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, BinaryIO, Final

from ratchet_contract.checkpoint.manifest import STATE_METADATA_KEY, TensorEntry
from ratchet_contract.errors import CheckpointError, StateError
from ratchet_hooks.state import safetensors_header
from ratchet_hooks.state.safetensors_header import ITEMSIZE, Stored, entries_json, frame_header, header_json

ALIGNMENT: Final = 4096  # the data starts on a page, so that it can be mapped and written with O_DIRECT
MAX_DIMENSIONS: Final = 64


def is_complete(shape: Iterable[int], dtype: str, start: int, nbytes: int) -> bool:
    """True if a piece of ``nbytes`` bytes from element ``start`` is the whole tensor of that shape and dtype."""
    return start == 0 and nbytes == math.prod(shape) * ITEMSIZE[dtype]


def tensor_key(entry: TensorEntry) -> str:
    """Return the key of a piece in its safetensors file: the tensor's name, or ``<name>#<start>`` for a part."""
    whole = is_complete(entry.shape, entry.dtype, entry.start, entry.nbytes)
    return entry.name if whole else f"{entry.name}#{entry.start}"


def header_entry(entry: TensorEntry, data_start: int) -> Stored:
    """Return the header's entry for a piece. ``data_start``: where the file's data begins, to which offsets are relative."""
    whole = is_complete(entry.shape, entry.dtype, entry.start, entry.nbytes)
    shape = tuple(entry.shape) if whole else (entry.nbytes // ITEMSIZE[entry.dtype],)
    begin = entry.offset - data_start
    return Stored(entry.dtype, shape, begin, begin + entry.nbytes)


def build_header(members: bytes, state_text: str) -> tuple[bytes, bytes, bytes]:
    """Return a rank file's header as three pieces, which the caller must join; the second is ``members``. ``members``: the
    JSON of the tensors' entries. ``state_text``: the rank's JSON state. Raise ``StateError`` if the header is too large."""
    try:
        return frame_header(header_json({STATE_METADATA_KEY: state_text}, members), ALIGNMENT)
    except ValueError as error:
        text = f"a rank's JSON state and tensor list are more than a checkpoint file can hold ({error})"
        raise StateError(f"{text}: keep large values in tensors") from None


def model_header(stored: dict[str, Stored], metadata: dict[str, str]) -> bytes:
    """Return the header of a safetensors file for other programs, with whole tensors. Raise ``StateError`` if it is too large."""
    try:
        return b"".join(frame_header(header_json(metadata, entries_json(stored)), 8))
    except ValueError as error:
        raise StateError(f"the list of tensors is more than a safetensors file can hold ({error})") from None


def parse_header(raw: bytes) -> tuple[dict[str, Stored], str]:
    """Return a rank file's header entries by key, and its state's JSON text. ``raw``: the header without its length field.
    Raise ``CheckpointError``; dtypes, shapes and offsets are not checked."""
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise CheckpointError("the safetensors header is not a JSON object")
    metadata = body.pop("__metadata__", None)
    text = metadata.get(STATE_METADATA_KEY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise CheckpointError("the safetensors header holds no rank state")
    try:
        stored = {
            key: Stored(str(value["dtype"]), tuple(value["shape"]), *map(int, value["data_offsets"]))
            for key, value in body.items()
        }
    except (TypeError, KeyError, ValueError, OverflowError):
        raise CheckpointError("the safetensors header has a malformed entry") from None
    return stored, text


def check_safetensors(file: BinaryIO, size: int) -> None:
    """Check that ``file``, of ``size`` bytes, has a valid safetensors header. Raise ``CheckpointError`` if not, ``OSError`` if
    reading fails."""
    try:
        safetensors_header.read_header(file, size)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def parse_json(raw: bytes | str) -> Any:
    """Return the value of a JSON text. Raise ``CheckpointError`` if it is invalid or may take far too much memory."""
    try:
        return safetensors_header.bounded_json(raw)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def refuse_json_bomb(raw: bytes | str) -> None:
    """Raise ``CheckpointError`` for a JSON text that may take far more memory than its length."""
    try:
        safetensors_header.refuse_json_bomb(raw)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
