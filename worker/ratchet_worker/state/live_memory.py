"""Reads of tensors' memory that user code may free during the read.

Any code that holds a tensor can resize its storage (``tensor.untyped_storage().resize_(0)``). A thread that reads the old memory
at that moment ends the process with SIGSEGV, and no public function of torch prevents it. A thread that runs concurrently with
user code therefore lets the kernel read: ``pwrite`` from memory without pages fails with EFAULT. Where the loop's code cannot
run, because its thread makes the read itself or waits for it, the memory is read directly; another thread of the script must not
free a tensor then.

No read here makes a storage permanently unresizable, as ``Tensor.numpy`` does: user code can resize its tensors as without
Ratchet.
"""

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
    """Return, not raise, the error for a tensor whose storage was resized between the step boundary and its copy. ``name``: the
    tensor's."""
    return ChangedTooEarly(f"the storage of {name} was resized before it was copied: {_ADVICE}")


def changed_error(name: str) -> ChangedTooEarly:
    """Return, not raise, the error for a tensor that was changed in place between the step boundary and its copy. ``name``: the
    tensor's."""
    return ChangedTooEarly(
        f"{name} was changed before it was copied, other than by the backward pass or optimizer.step(): {_ADVICE}"
    )


def is_row_major(tensor: torch.Tensor) -> bool:
    """True if a tensor is on the CPU, and its bytes in memory, in order, are those that a checkpoint stores of it."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def live_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a row-major tensor (``is_row_major``) as a 1-D array that shares its memory.

    The result keeps the tensor's storage alive; no pages are touched. Raises ``BufferError`` if the tensor has no memory any
    more.
    """
    if not tensor.numel():
        return np.empty(0, np.uint8)
    if not tensor.data_ptr():
        raise BufferError("the memory was freed")
    found: Bytes = np.from_dlpack(tensor.detach().view(-1).view(torch.uint8))  # type: ignore[assignment]
    return found


class LiveTensors(Mapping[str, torch.Tensor]):
    """Tensors by name as they are at one step boundary, when this object is created. They are views, not copies.

    User code can resize their storages. It cannot free them by giving a tensor other memory (``parameter.data = ...``).
    ``addresses`` and ``versions`` (torch's count of in-place changes): those at the boundary, in the order of ``tensors``.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
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
        """Return how often the tensor ``name`` had been changed in place at the boundary; None if torch does not count that."""
        return self.versions[self._numbers[name]]

    def require_intact(self, name: str) -> None:
        """Raises ``ChangedTooEarly`` if torch has counted an in-place change of the tensor ``name`` since the boundary, or if its
        memory has another address, since its storage was resized. Other changes, such as through numpy, are not noticed."""
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
    """Return the address of a tensor's memory, only for comparison. 0 for layouts and types without memory of their own, and for
    a storage that was emptied."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor.data_ptr() if tensor.layout is torch.strided else 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass that wraps other tensors
        return 0


def is_freed(tensor: torch.Tensor) -> bool:
    """True if a tensor has elements but no memory, since its storage was emptied."""
    try:
        return bool(tensor.numel()) and not tensor.data_ptr()
    except RuntimeError:  # a subclass that wraps other tensors
        return False


class SafeReader:
    """Reads memory that user code may free during the read: a freed memory raises ``BufferError`` instead of ending the process.
    For one thread at a time."""

    def __init__(self) -> None:
        self._file = _memory_file()
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, _WINDOW)
        self._window: Bytes = np.frombuffer(mmap.mmap(self._file, _WINDOW), np.uint8)

    def blocks(self, memory: Bytes) -> Iterator[Bytes]:
        """Yield copies of consecutive blocks of ``memory``. Each is valid until the next is requested. Raises ``BufferError`` if
        the memory was freed."""
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
        """Copy ``memory`` to ``target``, which has the same size. Raises ``BufferError`` if ``memory`` was freed; only a part of
        ``target`` may then be written."""
        done = 0
        for block in self.blocks(memory):
            np.copyto(target[done : done + block.size], block)
            done += block.size

    def private_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a CPU tensor with the same shape and strides. Raises ``BufferError`` if the tensor's memory was
        freed."""
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
    """Return the descriptor of a new file without a name, in memory if the system supports it. The caller closes it."""
    if hasattr(os, "memfd_create"):  # not in every build of Python
        return os.memfd_create("ratchet-reads", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
