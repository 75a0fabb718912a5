"""One rank's state in one safetensors file, without pickle, in place of ``torch.save`` and ``torch.load``."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.encode import decode, encode
from ratchet_hooks.state.safetensors_header import Stored, entries_json, frame_header, header_json, read_header

DTYPE_NAMES: Final[dict[torch.dtype, str]] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16", torch.int32: "I32",
    torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
"""safetensors names of the dtypes that can be stored."""
DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_KEY: Final = "ratchet_state"


def save_state(path: str | os.PathLike[str], state: object) -> None:
    """Write ``state``, which may be any value that ``encode`` accepts, to the file ``path``. The write is atomic. Missing
    directories are created; if none is missing, the write is also durable. One process at a time may write a path. Raises
    ``HookStateError`` and ``OSError``."""
    target, parts = Path(path), _parts(state)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp")
    with temporary.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    _sync(target.parent)


def load_state(path: str | os.PathLike[str]) -> Any:
    """Return the state that ``save_state`` wrote, with tensors on the CPU. Raises ``OSError``, such as ``FileNotFoundError``,
    and ``HookStateError`` for a malformed file; there is no checksum."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    with Path(path).open("rb") as file:
        return _read(file, os.fstat(file.fileno()).st_size, str(path))


def pack_state(state: object) -> torch.Tensor:
    """Return the bytes of the file that ``save_state`` would write, as a one-dimensional uint8 tensor. Raises
    ``HookStateError``."""
    return torch.frombuffer(bytearray().join(_parts(state)), dtype=torch.uint8)


def unpack_state(packed: torch.Tensor) -> Any:
    """Return the state that ``pack_state`` packed, with tensors on the CPU. Raises ``HookStateError`` for bytes that are
    incomplete or malformed."""
    content = packed.cpu().numpy().tobytes()
    return _read(io.BytesIO(content), len(content), "state")


def _parts(state: object) -> Iterator[memoryview | bytes]:
    """Return an iterator over the parts of the file's content. The call itself raises ``HookStateError``."""
    tensors, data = encode(state, root="state")
    stored: dict[str, Stored] = {}
    end = 0
    for name in sorted(
        tensors, key=lambda name: -tensors[name].element_size()
    ):  # so that each is aligned to its elements
        tensor = tensors[name]
        if tensor.dtype not in DTYPE_NAMES:
            raise HookStateError(name, f"tensors of {tensor.dtype} cannot be stored")
        stored[name] = Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), end, end + tensor.nbytes)
        end += tensor.nbytes
    try:
        header = frame_header(header_json({_KEY: json.dumps(data, allow_nan=False)}, entries_json(stored)), 8)
    except ValueError as error:
        raise HookStateError("state", f"too much of it is not in tensors: {error}") from None
    return itertools.chain(header, (_bytes(tensors[name].cpu()) for name in stored))


def _read(file: BinaryIO, size: int, where: str) -> Any:
    """Return the state in a file of ``size`` bytes that is open at its beginning. ``where``: the file's name in errors. Raises
    ``HookStateError``."""
    try:
        stored, metadata, _ = read_header(file, size)
        data = metadata.get(_KEY)
        tensors = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in stored.items()}
    except (ValueError, KeyError) as error:
        raise HookStateError(where, f"not a complete safetensors file: {error}") from None
    if not isinstance(data, str):
        raise HookStateError(where, "a safetensors file, but not one that save_state wrote")
    for name in sorted(stored, key=lambda name: stored[name][2:]):
        memory = _bytes(tensors[name])
        if file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
            raise HookStateError(where, "not a complete safetensors file: it became shorter")
    try:
        return decode(tensors, json.loads(data))
    except (ValueError, RecursionError) as error:  # a HookStateError is a ValueError
        raise HookStateError(where, f"its JSON part is damaged: {error}") from None


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _sync(path: Path) -> None:
    """Make the names in the directory ``path`` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
