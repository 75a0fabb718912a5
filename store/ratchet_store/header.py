"""The safetensors header of a rank file, whose metadata has that rank's JSON state.

``ratchet_hooks.safetensors_header`` has the format.
A piece of a tensor is stored as a 1-D tensor under ``<name>#<start>``; a whole tensor under its own name and shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, BinaryIO, Final

from ratchet_contract.errors import CheckpointError, StateError
from ratchet_contract.manifest import STATE_METADATA_KEY, TensorEntry
from ratchet_hooks import safetensors_header
from ratchet_hooks.safetensors_header import ITEMSIZE, Stored, framed, joined, members_of

ALIGNMENT: Final = 4096  # the data starts on a page, so that it can be mapped and written with O_DIRECT
MAX_DIMENSIONS: Final = 64


def is_whole(shape: Iterable[int], dtype: str, start: int, nbytes: int) -> bool:
    """Does a piece of ``nbytes`` bytes from element ``start`` hold the whole tensor?"""
    return start == 0 and nbytes == math.prod(shape) * ITEMSIZE[dtype]


def tensor_key(entry: TensorEntry) -> str:
    """The key of a piece in its safetensors file."""
    whole = is_whole(entry.shape, entry.dtype, entry.start, entry.nbytes)
    return entry.name if whole else f"{entry.name}#{entry.start}"


def stored_of(entry: TensorEntry, data_start: int) -> Stored:
    """The header entry that a manifest's entry stands for."""
    whole = is_whole(entry.shape, entry.dtype, entry.start, entry.nbytes)
    shape = tuple(entry.shape) if whole else (entry.nbytes // ITEMSIZE[entry.dtype],)
    begin = entry.offset - data_start
    return Stored(entry.dtype, shape, begin, begin + entry.nbytes)


def build_header(members: bytes, state_text: str) -> tuple[bytes, bytes, bytes]:
    """Length field and JSON, padded so that the data starts on a multiple of ``ALIGNMENT``, in pieces, since ``members`` (of
    ``members_of``) may be long. Raises ``StateError``."""
    try:
        return framed(joined({STATE_METADATA_KEY: state_text}, members), ALIGNMENT)
    except ValueError as error:
        text = f"a rank's JSON state and tensor list are more than a checkpoint file can hold ({error})"
        raise StateError(f"{text}: keep large values in tensors") from None


def model_header(stored: dict[str, Stored], metadata: dict[str, str]) -> bytes:
    """The same for a file that other programs read, with whole tensors and metadata of one's own. Raises ``StateError``."""
    try:
        return b"".join(framed(joined(metadata, members_of(stored)), 8))
    except ValueError as error:
        raise StateError(f"the list of tensors is more than a safetensors file can hold ({error})") from None


def parse_header(raw: bytes) -> tuple[dict[str, Stored], str]:
    """Header entries by key, and the state's JSON text. Raises ``CheckpointError``."""
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


def check_plain(file: BinaryIO, size: int) -> None:
    """Is a file of ``size`` bytes a safetensors file of any program? Raises ``CheckpointError``, ``OSError``."""
    try:
        safetensors_header.read_header(file, size)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def parse_json(raw: bytes | str) -> Any:
    """``safetensors_header.bounded_json``. Raises ``CheckpointError``."""
    try:
        return safetensors_header.bounded_json(raw)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def refuse_json_bomb(raw: bytes | str) -> None:
    """``safetensors_header.refuse_json_bomb``. Raises ``CheckpointError``."""
    try:
        safetensors_header.refuse_json_bomb(raw)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
