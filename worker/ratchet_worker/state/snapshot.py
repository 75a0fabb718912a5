"""One rank's state at a step boundary: shared tensors (in a checkpoint such as ``shared/model/<parameter>``), private ones
(there ``rank/<r>/<component>/<path>``), and JSON by component."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import xxhash

from ratchet_contract.errors import StateError, UserError
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.encode import decode, encode
from ratchet_hooks.state.files import DTYPES
from ratchet_worker.state.live_memory import live_bytes

Tensors = dict[str, torch.Tensor]
Sizes = Sequence[tuple[str, int, int]]
"""Name, number of elements and bytes per element of each tensor."""


class Until(IntEnum):
    """How long a captured tensor stays unchanged: not at all, until the next backward pass, or until the next
    ``optimizer.step()``."""

    BOUNDARY = 0
    BACKWARD = 1
    STEP = 2


@dataclass
class Snapshot:
    """One rank's captured state. ``shared``, ``private``: tensors by name. ``state``: the rest as JSON, by component. ``until``:
    by name, how long a tensor stays unchanged; ``BOUNDARY`` for a tensor that is not listed."""

    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    private: Tensors = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    until: Mapping[str, Until] = field(default_factory=dict)
    known_sizes: Sizes | None = None

    def sizes(self) -> Sizes:
        """Return name, number of elements and bytes per element of all shared tensors. If two snapshots return the same list
        object, their shared tensors have the same names and shapes."""
        if self.known_sizes is None:
            self.known_sizes = [(name, t.numel(), t.element_size()) for name, t in self.shared.items()]
        return self.known_sizes

    def add(self, component: str, value: object) -> None:
        """Encode ``value``, and add it as this rank's own state of ``component``. Raises ``UserError`` naming what cannot be
        stored."""
        self.add_with(component, lambda: encode(value, root=component))

    def add_with(self, component: str, make: Callable[[], tuple[Mapping[str, torch.Tensor], Any]]) -> None:
        """Add the tensors and JSON that ``make`` returns as the state of ``component``. Raises ``UserError`` if they cannot be
        stored."""
        try:
            self.add_encoded(component, *make())
        except HookStateError as error:
            raise UserError(f"{error.key}: {error.detail}", code="state-unsaved") from error

    def add_encoded(self, component: str, tensors: Mapping[str, torch.Tensor], data: Any) -> None:
        """Add a state of ``component`` that is already encoded as tensors, by name within the component, and JSON."""
        self.state[component] = data
        for name, tensor in tensors.items():
            self.private[f"{component}/{name}"] = tensor

    def value(self, component: str, *, exclude: Collection[str] = ()) -> Any:
        """Return the decoded value of ``component``, without tensors of parameters in ``exclude``. Raises ``StateError`` if it is
        missing or malformed."""
        tensors, data = self.encoded(component)
        tensors = {name: t for name, t in tensors.items() if name.rpartition("/")[0] not in exclude}
        try:
            return decode(tensors, data)
        except HookStateError as error:
            raise StateError(f"{component}: {error.key}: {error.detail}") from error

    def encoded(self, component: str) -> tuple[Tensors, Any]:
        """Return the private tensors, by name within the component, and the JSON of ``component``. Raises ``StateError`` if it is
        missing."""
        if component not in self.state:
            raise StateError(f"{component}: the checkpoint has no state of that name")
        prefix = f"{component}/"
        return {n.removeprefix(prefix): t for n, t in self.private.items() if n.startswith(prefix)}, self.state[
            component
        ]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes as a view of its memory. The storage cannot be resized afterwards."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` in row-major order as a 1-D tensor, a view where possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def tensor_addresses(state: Any) -> Iterator[int]:
    """Yield the memory addresses of all tensors in a state, at any depth of dicts, lists and tuples."""
    if isinstance(state, torch.Tensor):
        yield state.data_ptr()
    elif isinstance(state, (dict, list, tuple)):
        for item in state.values() if isinstance(state, dict) else state:
            yield from tensor_addresses(item)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return the hex XXH3-128 over the bytes of all tensors, row-major. No user code may free their memory meanwhile."""
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        hasher.update(live_bytes(flat(tensor).cpu()).data)
    return hasher.hexdigest()


def empty(dtype: str, shape: Iterable[int]) -> torch.Tensor:
    """Return an uninitialised CPU tensor. ``dtype``: its stored name. Raises ``StateError`` for an unknown one."""
    if dtype not in DTYPES:
        raise StateError(f"dtype {dtype} is not known here")
    kind, size = DTYPES[dtype], tuple(shape)
    # Deterministic algorithms fill what ``torch.empty`` returns; a storage is never filled.
    storage = torch.UntypedStorage(math.prod(size) * kind.itemsize, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=kind, device="cpu").set_(storage, 0, size)  # type: ignore[call-overload, no-any-return]
