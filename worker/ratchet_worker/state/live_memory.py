"""Reads tensors' memory that user code may free during the read, as by ``untyped_storage().resize_(0)``. A plain read could then
end the process with SIGSEGV. So a thread that reads while user code runs lets the kernel read: ``pwrite`` from unmapped memory
fails."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ratchet_contract.errors import StateError
from ratchet_hooks.torch_compat import negative_view, version_of, versions_of

Bytes: TypeAlias = NDArray[np.uint8]

_WINDOW: Final = 1 << 20
"""Bytes that the kernel reads at a time: they stay in the processor's caches until they are copied or hashed."""
_PLAIN_TYPES: Final = (torch.Tensor, torch.nn.Parameter)
_ADVICE: Final = (
    "set checkpoint.staging to blocking, which copies everything before the next step begins; if it is already, a thread of the "
    "script changes the tensor while the loop waits"
)


class ChangedTooEarly(StateError):
    """Raised if user code changed a tensor between the step boundary and its copy, or resized its storage."""


def resized_error(name: str) -> ChangedTooEarly:
    """Return the error for a tensor ``name`` whose storage was resized between the step boundary and its copy."""
    return ChangedTooEarly(f"the storage of {name} was resized before it was copied: {_ADVICE}")


def changed_error(name: str) -> ChangedTooEarly:
    """Return the error for a tensor ``name`` that was changed in place between the step boundary and its copy."""
    return ChangedTooEarly(
        f"{name} was changed before it was copied, other than by the backward pass or optimizer.step(): {_ADVICE}"
    )


def is_row_major(tensor: torch.Tensor) -> bool:
    """True if a tensor is on the CPU and its memory has exactly the bytes that a checkpoint stores."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def live_bytes(tensor: torch.Tensor) -> Bytes:
    """Return a row-major tensor's bytes as a 1-D array that shares its memory. Raises ``BufferError`` if that was freed."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    if not tensor.data_ptr():
        raise BufferError("the memory was freed")
    found: Bytes = np.from_dlpack(tensor.detach().view(-1).view(torch.uint8))  # type: ignore[assignment]
    return found


class LiveTensors(Mapping[str, torch.Tensor]):
    """Views of tensors, by name, at a step boundary. ``addresses``: the tensors' addresses at the boundary; ``versions``: torch's
    counts of their in-place changes at the boundary. Both are in the order of ``tensors``."""

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        # Views: giving a parameter other memory (``parameter.data = ...``) does not free this one.
        self.tensors = [*map(torch.Tensor.detach, tensors)]
        self.addresses, self.versions = [*map(address, self.tensors)], versions_of(self.tensors)
        self._numbers = {name: number for number, name in enumerate(names)}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[self._numbers[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def version(self, name: str) -> int | None:
        """Return torch's count of in-place changes of the tensor ``name`` at the boundary; None if torch does not count."""
        return self.versions[self._numbers[name]]

    def require_intact(self, name: str) -> None:
        """Raise ``ChangedTooEarly`` if torch has counted an in-place change of the tensor since the boundary, or its address
        differs."""
        number = self._numbers[name]
        if address(self.tensors[number]) != self.addresses[number]:
            raise resized_error(name)
        if version_of(self.tensors[number]) != self.versions[number]:
            raise changed_error(name)

    def require_all_intact(self) -> None:
        """Raises ``ChangedTooEarly`` for the first tensor that is not intact (see ``require_intact``)."""
        if [*map(address, self.tensors)] != self.addresses or versions_of(self.tensors) != self.versions:
            for name in self._numbers:
                self.require_intact(name)


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, for comparison only. Return 0 if torch gives no address, as for a sparse
    tensor."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor.data_ptr() if tensor.layout is torch.strided else 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass that wraps other tensors
        return 0


def is_freed(tensor: torch.Tensor) -> bool:
    """True if a tensor has elements but no memory, as after its storage was emptied."""
    try:
        return bool(tensor.numel()) and not tensor.data_ptr()
    except RuntimeError:  # a subclass that wraps other tensors
        return False


class SafeReader:
    """Reads memory that user code may free meanwhile, which raises ``BufferError`` instead of ending the process. For one
    thread."""

    def __init__(self) -> None:
        self._file = _memory_file()
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, _WINDOW)
        self._window: Bytes = np.frombuffer(mmap.mmap(self._file, _WINDOW), np.uint8)

    def blocks(self, memory: Bytes) -> Iterator[Bytes]:
        """Yield copies of consecutive blocks of ``memory``, each valid until the next is requested. Raises ``BufferError`` if it
        was freed."""
        for begin in range(0, memory.size, _WINDOW):
            block, done = memory[begin : begin + _WINDOW], 0
            while done < block.size:
                try:
                    done += os.pwrite(self._file, block[done:].data, done)
                except OSError as error:
                    if error.errno != errno.EFAULT:
                        raise
                    raise BufferError("the memory was freed") from error
            yield self._window[: block.size]

    def copy(self, memory: Bytes, target: Bytes) -> None:
        """Copy ``memory`` to ``target`` of the same size. Raises ``BufferError``, perhaps after a part, if ``memory`` was
        freed."""
        done = 0
        for block in self.blocks(memory):
            np.copyto(target[done : done + block.size], block)
            done += block.size

    def private_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a CPU tensor with its strides. Raises ``BufferError`` if the tensor's memory was freed."""
        if tensor.is_neg():
            return negative_view(self.private_copy(negative_view(tensor)))
        if tensor.is_conj():
            return self.private_copy(tensor.conj()).conj()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        copy = torch.empty(extent if tensor.numel() else 0, dtype=tensor.dtype)
        if tensor.numel():
            try:
                memory = live_bytes(tensor.detach().as_strided((extent,), (1,)))
            except RuntimeError as error:  # the storage is smaller than the tensor
                raise BufferError("the memory was freed") from error
            self.copy(memory, copy.view(torch.uint8).numpy())
        return copy.as_strided(tensor.shape, tensor.stride())


def _memory_file() -> int:
    """Return the descriptor of a new nameless file, in memory where possible. The caller closes it."""
    if hasattr(os, "memfd_create"):  # not in every build of Python
        return os.memfd_create("ratchet-reads", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
