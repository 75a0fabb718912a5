"""Digests to compare batches that are read again with those that were handed out before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
import xxhash

from ratchet_worker.state.snapshot import byte_view, flat

_BYTES: Final = 64 << 10
_LEAVES: Final = 4096
_DEPTH: Final = 20
_MAX_PENDING: Final = 64  # batches on an accelerator that are hashed together


class BatchDigest:
    """A digest (XXH3-128) of ``batch`` as it is at construction. It covers a sample of the content, mostly at most 64 KiB."""

    def __init__(self, batch: Any) -> None:
        leaves = list(islice(_leaves(batch, 0), _LEAVES))
        share = max(_BYTES // max(len(leaves), 1), 16)
        self._parts = [_part(leaf, share) for leaf in leaves]

    @property
    def on_host(self) -> bool:
        """True if ``hex`` does not have to wait for an accelerator, since all data to hash are in host memory."""
        return all(isinstance(part, bytes) for part in self._parts)

    def hex(self) -> str:
        """Return the digest as hexadecimal text. Waits for copies from an accelerator."""
        hasher = xxhash.xxh3_128()
        for part in self._parts:
            hasher.update(part if isinstance(part, bytes) else byte_view(part.cpu()))
        return hasher.hexdigest()


class BatchChain:
    """One digest (XXH3-128) over the digests of several batches, in order."""

    def __init__(self) -> None:
        self._value = ""
        self._pending: list[BatchDigest] = []

    def add(self, digest: BatchDigest) -> BatchChain:
        """Append the digest of the next batch and return this object."""
        self._pending.append(digest)
        if digest.on_host or len(self._pending) == _MAX_PENDING:
            self.hex()
        return self

    def hex(self) -> str:
        """Return the digest of all batches so far as hexadecimal text; empty before the first. May wait for an accelerator."""
        for digest in self._pending:
            self._value = xxhash.xxh3_128_hexdigest((self._value + digest.hex()).encode())
        self._pending = []
        return self._value


def _leaves(item: Any, depth: int) -> Iterator[Any]:
    """Yield what is hashed of ``item``: tensors and arrays, and other values as bytes."""
    if isinstance(item, torch.Tensor):
        yield from _tensors(item)
    elif isinstance(item, np.ndarray) and item.dtype.kind != "O":
        yield item
    elif item is None or isinstance(item, (str, bytes, int, float, complex, np.generic)):
        yield item if isinstance(item, bytes) else f"{type(item).__name__}:{item!r}".encode(errors="replace")
    else:
        yield type(item).__qualname__.encode()
        if depth < _DEPTH:
            for child in _children(item):
                yield from _leaves(child, depth + 1)


def _children(item: Any) -> Iterator[Any]:
    """Yield what is hashed of a container or another object, such as its items or its attribute values."""
    if isinstance(item, Mapping):
        for key, value in item.items():
            yield from (repr(key), value)
    elif isinstance(item, (set, frozenset)):
        yield from sorted(map(repr, item))
    elif isinstance(item, np.ndarray):
        yield from np.atleast_1d(item)  # an array without dimensions cannot be iterated over
    elif isinstance(item, (list, tuple)):
        yield from item
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield from (getattr(item, field.name, None) for field in dataclasses.fields(item))
    else:
        yield from getattr(item, "__dict__", {}).values()


def _tensors(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield what is hashed of ``tensor``: plain tensors with its values, and descriptions as bytes."""
    tensor = tensor.detach()
    if tensor.is_nested:
        for part in tensor.unbind():
            yield from _tensors(part)
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (f"{tuple(tensor.shape)}".encode(), tensor.indices(), tensor.values())
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        yield f"{tensor.layout}:{tensor.dtype}:{tuple(tensor.shape)}".encode()
    else:
        yield tensor


def _part(leaf: Any, share: int) -> bytes | torch.Tensor:
    """Return a sample of ``leaf``, mostly of about ``share`` bytes at most: as bytes, or as a tensor on an accelerator."""
    if isinstance(leaf, bytes):
        return leaf[: share // 2] + leaf[-(share // 2) :] + b"%d" % len(leaf)
    grid = tuple(_grid(tuple(leaf.shape), leaf.itemsize, share))
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype.str}:{leaf.shape}".encode() + leaf[grid].tobytes()
    found = flat(leaf[grid] if grid else leaf)
    return f"{leaf.dtype}:{tuple(leaf.shape)}".encode() + byte_view(found).tobytes() if found.is_cpu else found.clone()


def _grid(shape: tuple[int, ...], size: int, share: int) -> Iterator[slice]:
    """Yield one slice per dimension that thins a tensor of ``shape``, with ``size`` bytes per element, to about ``share`` bytes,
    or somewhat more."""
    total = size
    for length in shape:
        total *= length
    steps = [1] * len(shape)
    # The first dimension (samples) is thinned last, only if the others are not enough.
    for dimension in [*range(len(shape) - 1, 0, -1), 0] if shape else []:
        if total <= share:
            break
        rest = dimension if dimension > 0 else 1
        steps[dimension] = min(shape[dimension], int(np.ceil((total / share) ** (1 / rest))))
        total = total // shape[dimension] * -(-shape[dimension] // steps[dimension])
    for length, step in zip(shape, steps, strict=True):
        yield slice(min(step // 2, max(length - 1, 0)), None, step)
