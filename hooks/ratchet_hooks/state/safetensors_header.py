"""The safetensors header: ``<u64 length><JSON, padded with spaces><data>``. Torch-free. Format:
https://github.com/huggingface/safetensors#format."""

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
    """A header that was read. ``tensors``: the entries by key. ``start``: offset of the data in the file, in bytes."""

    tensors: dict[str, Stored]
    metadata: Mapping[str, Any]
    start: int


def entries_json(stored: Mapping[str, Stored]) -> bytes:
    """Return the tensors' entries of a header as JSON, without the braces around them."""
    body = {
        key: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for key, (dtype, shape, begin, end) in stored.items()
    }
    return _dump(body)[1:-1]


def header_json(metadata: Mapping[str, str], members: bytes) -> tuple[bytes, bytes, bytes]:
    """Return a header's JSON as three pieces, which the caller joins. ``members``: the tensors' entries from ``entries_json``."""
    return b'{"__metadata__":' + _dump(metadata) + (b"," if members else b""), members, b"}"


def frame_header(parts: tuple[bytes, bytes, bytes], alignment: int) -> tuple[bytes, bytes, bytes]:
    """Return a header as three pieces, padded so that the data starts on a multiple of ``alignment`` bytes. Raises ``ValueError``
    if it is too long or may have too many values."""
    size = sum(map(len, parts))
    if size > MAX_JSON_VALUES and sum(map(_max_value_count, parts)) > MAX_JSON_VALUES:  # a value has at least one byte
        raise ValueError(f"it has more than {MAX_JSON_VALUES} values")
    length = -(-(LENGTH_BYTES + size) // alignment) * alignment - LENGTH_BYTES
    if length > MAX_HEADER:
        raise ValueError(f"it needs {length} bytes, more than a safetensors header can have ({MAX_HEADER})")
    first, members, last = parts
    return length.to_bytes(LENGTH_BYTES, "little") + first, members, last.ljust(len(last) + length - size)


def read_header(file: BinaryIO, size: int) -> Header:
    """Return the checked header of a safetensors file of ``size`` bytes, open at its beginning. Raises ``ValueError`` if it does
    not describe exactly the file's data."""
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
    """Return one checked entry of a header. Raises ``ValueError`` if it is malformed, or if its bytes do not fit its shape."""
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
    """Return the value of a JSON text of unknown origin. Raises ``ValueError``, also if it may have too many values."""
    refuse_json_bomb(raw)
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {type(error).__name__}: {str(error)[:200]}") from None


def refuse_json_bomb(raw: bytes | str) -> None:
    """Raise ``ValueError`` for a JSON text that may have so many values that they need far more memory than its length."""
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
