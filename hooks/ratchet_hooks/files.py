"""One rank's state in one file, without pickle: a drop-in for ``torch.save`` and ``torch.load`` in a script of one's own.

The file is a safetensors file; the JSON part of ``ratchet_hooks.codec`` stands in its metadata. What comes back is what went in,
bit for bit, with tensors on the CPU (``load_state_dict`` copies them to where they belong).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file

from ratchet_hooks.codec import decode, encode
from ratchet_hooks.errors import HookStateError

_KEY = "ratchet_state"


def save_state(path: str | os.PathLike[str], state: object) -> None:
    """Write ``state`` (what ``encode`` accepts; ``ManagedHook.capture()`` among it) to ``path``, all of it or nothing.

    A process that is killed here leaves the file of before. Raises ``HookStateError`` naming the key of what cannot be stored.
    """
    target = Path(path)
    tensors, data = encode(state, where="state")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp")
    save_file(tensors, temporary, metadata={_KEY: json.dumps(data, allow_nan=False)})
    _sync(temporary)
    temporary.replace(target)
    _sync(target.parent)


def load_state(path: str | os.PathLike[str]) -> Any:
    """What ``save_state`` was given. Raises ``FileNotFoundError``, and ``HookStateError`` for a file that is none of its own."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise HookStateError(str(path), f"not a whole safetensors file: {error}") from None
    return _decoded(str(path), tensors, metadata)


def pack_state(state: object) -> torch.Tensor:
    """The bytes of the file that ``save_state`` would write, as a uint8 tensor, for keeping inside of another checkpoint."""
    tensors, data = encode(state, where="state")
    return torch.frombuffer(
        bytearray(save(tensors, metadata={_KEY: json.dumps(data, allow_nan=False)})), dtype=torch.uint8
    )


def unpack_state(packed: torch.Tensor) -> Any:
    """What ``pack_state`` was given. Raises ``HookStateError`` for bytes that are none of its own."""
    content = packed.cpu().numpy().tobytes()
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise HookStateError("state", f"not a whole safetensors file: {error}") from None
    length = int.from_bytes(content[:8], "little")
    return _decoded("state", tensors, json.loads(content[8 : 8 + length]).get("__metadata__", {}))


def _decoded(where: str, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> Any:
    if _KEY not in metadata:
        raise HookStateError(where, "a safetensors file, but not one that save_state wrote")
    try:
        data = json.loads(metadata[_KEY])
    except (ValueError, RecursionError) as error:
        raise HookStateError(where, f"its JSON part is damaged: {error}") from None
    return decode(tensors, data)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
