"""The safetensors header: ``<u64 length><JSON, padded with spaces><data>``. Torch-free.

Format: https://github.com/huggingface/safetensors#format. The JSON maps keys to dtype, shape and data offsets (bytes from the
start of the data); ``__metadata__`` maps strings to strings. Tensors follow one another without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, NamedTuple

ITEMSIZE: Final[dict[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of every dtype that safetensors names and that has whole bytes."""

LENGTH_BYTES: Final = 8
MAX_HEADER: Final = 64 << 20  # the safetensors library refuses more than 100 MB
MAX_JSON_VALUES: Final = 4_000_000  # bounds what a small hostile text can make the parser allocate
_METADATA: Final = "__metadata__"


class Stored(NamedTuple):
    """One tensor's entry in a header. ``shape``: as stored; ``begin`` and ``end``: bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """A header that was read: the tensors' entries by key, the metadata, and ``start``, the offset of the data in the file, in
    bytes. The metadata is empty if the header has none or no JSON object there; its values may be of any type."""

    tensors: dict[str, Stored]
    metadata: Mapping[str, Any]
    start: int


def entries_json(stored: Mapping[str, Stored]) -> bytes:
    """Return the tensors' entries as JSON, without the braces around them: the part of a header that does not depend on the
    metadata."""
    body = {
        key: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for key, (dtype, shape, begin, end) in stored.items()
    }
    return _dump(body)[1:-1]


def header_json(metadata: Mapping[str, str], members: bytes) -> tuple[bytes, bytes, bytes]:
    """Return a header's JSON as three pieces, which the caller joins. ``members``: the tensors' entries from ``entries_json``;
    it is the second piece, uncopied, since it may be long."""
    return b'{"__metadata__":' + _dump(metadata) + (b"," if members else b""), members, b"}"


def frame_header(parts: tuple[bytes, bytes, bytes], alignment: int) -> tuple[bytes, bytes, bytes]:
    """Return a complete header in three pieces: the length field and the JSON ``parts`` (from ``header_json``), padded with
    spaces so that the data starts on a multiple of ``alignment`` bytes.

    Raises ``ValueError`` for a header that ``read_header`` would refuse as too long or for too many values.
    """
    size = sum(map(len, parts))
    if size > MAX_JSON_VALUES and sum(map(_max_value_count, parts)) > MAX_JSON_VALUES:  # a value has at least one byte
        raise ValueError(f"it has more than {MAX_JSON_VALUES} values")
    length = -(-(LENGTH_BYTES + size) // alignment) * alignment - LENGTH_BYTES
    if length > MAX_HEADER:
        raise ValueError(f"it needs {length} bytes, more than a safetensors header can have ({MAX_HEADER})")
    first, members, last = parts
    return length.to_bytes(LENGTH_BYTES, "little") + first, members, last.ljust(len(last) + length - size)


def read_header(file: BinaryIO, size: int) -> Header:
    """Read and check the header of a safetensors file that is open at its beginning and has ``size`` bytes. Any program may
    have written it. The entries must describe exactly the data that follows; the data are not read.

    Raises ``ValueError`` if the header is invalid or the file is not complete, and ``OSError``.
    """
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or length > min(MAX_HEADER, size - LENGTH_BYTES):
        raise ValueError("the header's length is impossible")
    body = bounded_json(file.read(length))
    if not isinstance(body, dict):
        raise ValueError("the header is not a JSON object")
    metadata = body.pop(_METADATA, None)
    tensors = {key: _entry(key, value) for key, value in body.items()}
    end = 0
    for key, stored in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if stored.begin != end:
            raise ValueError(f"the entry of {key[:100]!r} does not begin where the one before ends")
        end = stored.end
    if end != size - LENGTH_BYTES - length:
        raise ValueError(f"it has {size - LENGTH_BYTES - length} bytes of data, its header declares {end}")
    return Header(tensors, metadata if isinstance(metadata, dict) else {}, LENGTH_BYTES + length)


def _entry(key: str, value: Any) -> Stored:
    """Return one checked entry of a header. Raises ``ValueError`` if it is malformed, or if its bytes do not fit its shape and
    dtype."""
    try:
        begin, end = map(int, value["data_offsets"])
        stored = Stored(value["dtype"], tuple(map(int, value["shape"])), begin, end)
        whole = min(stored.shape, default=0) >= 0 <= begin <= end
        if whole and end - begin == math.prod(stored.shape) * ITEMSIZE[stored.dtype]:
            return stored
    except (TypeError, KeyError, ValueError, OverflowError):
        pass
    raise ValueError(f"the entry of {key[:100]!r} is malformed")


def bounded_json(raw: bytes | str) -> Any:
    """Return the value of a JSON text of unknown origin. Raises ``ValueError`` for invalid JSON, NaN or infinity, too deep
    nesting, or too many values (``refuse_json_bomb``)."""
    refuse_json_bomb(raw)
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {type(error).__name__}: {str(error)[:200]}") from None


def refuse_json_bomb(raw: bytes | str) -> None:
    """Raise ``ValueError`` for a JSON text that may have more than ``MAX_JSON_VALUES`` values, which would need far more memory
    than its length. Commas and brackets are counted, also those inside strings."""
    if _max_value_count(raw) > MAX_JSON_VALUES:
        raise ValueError(f"JSON with more than {MAX_JSON_VALUES} values is refused")


def _max_value_count(raw: bytes | str) -> int:
    """Return an upper bound of the number of values in a JSON text, the outermost value not counted."""
    if isinstance(raw, str):
        return raw.count(",") + raw.count("[") + raw.count("{")
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
