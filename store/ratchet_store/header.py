"""The safetensors header: ``<u64 length><JSON, padded with spaces><data>``.

Format: https://github.com/huggingface/safetensors#format. The JSON maps keys to dtype, shape and data offsets (bytes from the
start of the data); ``__metadata__`` maps strings to strings. Tensors follow one another without gaps.
A piece of a tensor is stored as a 1-D tensor under ``<name>#<start>``; a whole tensor under its own name and shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, BinaryIO, Final, NamedTuple

from ratchet_contract.errors import CheckpointError, StateError
from ratchet_contract.manifest import STATE_METADATA_KEY, TensorEntry

ITEMSIZE: Final[dict[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of every dtype that safetensors names and that has whole bytes."""

LENGTH_BYTES: Final = 8
ALIGNMENT: Final = 4096  # the data starts on a page, so that it can be mapped and written with O_DIRECT
MAX_HEADER: Final = 64 << 20  # the safetensors library refuses more than 100 MB
MAX_JSON_VALUES: Final = 4_000_000  # bounds what a small hostile text can make the parser allocate
MAX_DIMENSIONS: Final = 64


class Stored(NamedTuple):
    """One header entry: shape as stored, ``begin``/``end`` in bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


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


def members_of(stored: dict[str, Stored]) -> bytes:
    """What of a header follows from the tensors alone: their entries as JSON, without the braces around them."""
    body = {
        key: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for key, (dtype, shape, begin, end) in stored.items()
    }
    return _dump(body)[1:-1]


def build_header(members: bytes, state_text: str) -> tuple[bytes, bytes, bytes]:
    """Length field and JSON, padded so that the data starts on a multiple of ``ALIGNMENT``, in pieces, since ``members`` (of
    ``members_of``) may be long. Raises ``StateError``."""
    parts = _joined({STATE_METADATA_KEY: state_text}, members)
    size = sum(map(len, parts))
    length = -(-(LENGTH_BYTES + size) // ALIGNMENT) * ALIGNMENT - LENGTH_BYTES
    # A value has a byte at least.
    if length > MAX_HEADER or (size > MAX_JSON_VALUES and sum(map(_values, parts)) > MAX_JSON_VALUES):
        raise StateError(
            f"a rank's JSON state and tensor list need {length} bytes, more than a checkpoint file can hold ({MAX_HEADER}): "
            "keep large values in tensors"
        )
    return _framed(parts, size, length)


def model_header(stored: dict[str, Stored], metadata: dict[str, str]) -> bytes:
    """The same for a file that other programs read, with whole tensors and metadata of one's own. Raises ``StateError``."""
    parts = _joined(metadata, members_of(stored))
    size = sum(map(len, parts))
    length = -(-size // 8) * 8
    if length > MAX_HEADER:
        raise StateError(
            f"the list of tensors needs {length} bytes, more than a safetensors file can hold ({MAX_HEADER})"
        )
    return b"".join(_framed(parts, size, length))


def _joined(metadata: dict[str, str], members: bytes) -> tuple[bytes, bytes, bytes]:
    """The JSON, in pieces."""
    return b'{"__metadata__":' + _dump(metadata) + (b"," if members else b""), members, b"}"


def _framed(parts: tuple[bytes, bytes, bytes], size: int, length: int) -> tuple[bytes, bytes, bytes]:
    """``size`` bytes of JSON behind the field that says ``length``, padded to it."""
    first, members, last = parts
    return length.to_bytes(LENGTH_BYTES, "little") + first, members, last.ljust(len(last) + length - size)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


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
    """Is a file of ``size`` bytes a safetensors file of any program: its header sound, its data all there? Raises
    ``CheckpointError``, ``OSError``."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or length > min(MAX_HEADER, size - LENGTH_BYTES):
        raise CheckpointError("the header's length is impossible")
    body = parse_json(file.read(length))
    if not isinstance(body, dict):
        raise CheckpointError("the header is not a JSON object")
    end = 0
    for key, value in body.items():
        if key == "__metadata__":
            continue
        try:
            begin, stop = map(int, value["data_offsets"])
            whole = 0 <= begin <= stop and stop - begin == math.prod(value["shape"]) * ITEMSIZE[value["dtype"]]
        except (TypeError, KeyError, ValueError, OverflowError):
            whole = False
        if not whole:
            raise CheckpointError(f"the entry of {key[:100]!r} is malformed")
        end = max(end, stop)
    if end != size - LENGTH_BYTES - length:
        raise CheckpointError(f"it has {size - LENGTH_BYTES - length} bytes of data, its header speaks of {end}")


def parse_json(raw: bytes | str) -> Any:
    """``json.loads`` for text of unknown origin: bounded depth, bounded number of values, no NaN. Raises ``CheckpointError``."""
    refuse_json_bomb(raw)
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON: {type(error).__name__}: {str(error)[:200]}") from None


def refuse_json_bomb(raw: bytes | str) -> None:
    """Raise ``CheckpointError`` for a text whose values would need memory out of proportion to its length."""
    if _values(raw) > MAX_JSON_VALUES:
        raise CheckpointError(f"JSON with more than {MAX_JSON_VALUES} values is refused")


def _values(raw: bytes | str) -> int:
    if isinstance(raw, str):
        return raw.count(",") + raw.count("[") + raw.count("{")
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
