"""Digests that show whether batches read again are the ones that were handed out before."""

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
    """A digest (XXH3-128) of ``batch`` as it is now, over at most about 64 KiB of its tensors, arrays, numbers and strings.
    Later in-place changes have no effect. Large tensors are sampled on an even grid of elements, long strings at both ends; of
    more than 4096 values the rest is left out. Tensors on an accelerator are copied there now, without waiting for the copy, and
    hashed when ``hex`` is called."""

    def __init__(self, batch: Any) -> None:
        leaves = list(islice(_leaves(batch, 0), _LEAVES))
        share = max(_BYTES // max(len(leaves), 1), 16)
        self._parts = [_part(leaf, share) for leaf in leaves]

    @property
    def on_host(self) -> bool:
        """True if ``hex`` needs nothing from an accelerator, so that it does not wait."""
        return all(isinstance(part, bytes) for part in self._parts)

    def hex(self) -> str:
        """Return the digest as hexadecimal text. Waits for copies from an accelerator."""
        hasher = xxhash.xxh3_128()
        for part in self._parts:
            hasher.update(part if isinstance(part, bytes) else byte_view(part.cpu()))
        return hasher.hexdigest()


class BatchChain:
    """One digest (XXH3-128) over the digests of several batches in order: each value hashes the value before it and the digest
    of the next batch."""

    def __init__(self) -> None:
        self._value = ""
        self._pending: list[BatchDigest] = []

    def add(self, digest: BatchDigest) -> BatchChain:
        """Append the digest of the next batch and return this object. Digests on an accelerator are hashed later, up to 64 at
        once."""
        self._pending.append(digest)
        if digest.on_host or len(self._pending) == _MAX_PENDING:
            self.hex()
        return self

    def hex(self) -> str:
        """Return the digest of all batches so far as hexadecimal text; empty before the first. Waits for copies from an
        accelerator."""
        for digest in self._pending:
            self._value = xxhash.xxh3_128_hexdigest((self._value + digest.hex()).encode())
        self._pending = []
        return self._value


def _leaves(item: Any, depth: int) -> Iterator[Any]:
    """Yield what is hashed of ``item``, in a fixed order: its tensors and arrays, and as bytes everything else, including the
    type names of containers. Containers nested deeper than ``_DEPTH`` are represented by their type names."""
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
    """Yield the items of a container, or the attribute values of another object. A mapping yields the ``repr`` of each key
    before its value; a set yields the ``repr`` of its items, sorted."""
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
    """Yield the plain tensors that make up ``tensor``. For a layout whose values cannot be read simply, yield its type and shape
    as bytes."""
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
    """Return a sample of about ``share`` bytes of ``leaf`` at most. For a leaf on the CPU these are bytes, with its type and
    shape (for bytes: its length). For one on an accelerator it is a tensor, copied there."""
    if isinstance(leaf, bytes):
        return leaf[: share // 2] + leaf[-(share // 2) :] + b"%d" % len(leaf)
    grid = tuple(_grid(tuple(leaf.shape), leaf.itemsize, share))
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype.str}:{leaf.shape}".encode() + leaf[grid].tobytes()
    found = flat(leaf[grid] if grid else leaf)
    return f"{leaf.dtype}:{tuple(leaf.shape)}".encode() + byte_view(found).tobytes() if found.is_cpu else found.clone()


def _grid(shape: tuple[int, ...], size: int, share: int) -> Iterator[slice]:
    """Yield one slice per dimension that thins a tensor of ``shape``, with ``size`` bytes per element, to about ``share`` bytes.
    Inner dimensions are thinned evenly, the first (samples) only if that is not enough."""
    total = size
    for length in shape:
        total *= length
    steps = [1] * len(shape)
    for dimension in [*range(len(shape) - 1, 0, -1), 0] if shape else []:
        if total <= share:
            break
        rest = dimension if dimension > 0 else 1
        steps[dimension] = min(shape[dimension], int(np.ceil((total / share) ** (1 / rest))))
        total = total // shape[dimension] * -(-shape[dimension] // steps[dimension])
    for length, step in zip(shape, steps, strict=True):
        yield slice(min(step // 2, max(length - 1, 0)), None, step)
