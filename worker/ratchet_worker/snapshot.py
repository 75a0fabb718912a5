"""One rank's whole state at a step boundary, split into what is equal on all ranks and what is this rank's own.

Names: ``shared/model/<parameter>``, ``shared/optimizer/<parameter>/<key>``; private: ``rank/<r>/<component>/<path>``. Where the
hook lets replicas differ, the first group is private too. Everything that is not a tensor lies in the rank file's JSON state,
one entry per component, as ``ratchet_hooks.codec`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import xxhash

from ratchet_contract.errors import StateError, UserError
from ratchet_hooks.codec import decode, encode
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.files import DTYPES
from ratchet_worker.live_memory import live_bytes

Tensors = dict[str, torch.Tensor]
Sizes = Sequence[tuple[str, int, int]]
"""Name, elements and bytes per element of tensors."""


class Until(IntEnum):
    """How long after the boundary a captured tensor stays as it is: the forward pass changes buffers, the backward pass the
    hook's state, ``optimizer.step()`` parameters and the optimizer's own."""

    BOUNDARY = 0
    BACKWARD = 1
    STEP = 2


@dataclass
class Snapshot:
    """``shared`` and ``private`` by name without prefix (``model/weight``, ``rng/torch``), ``state`` by component. ``until``: of
    those that stay as they are for longer than the boundary, by the same names."""

    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    private: Tensors = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    until: Mapping[str, Until] = field(default_factory=dict)
    known_sizes: Sizes | None = None

    def sizes(self) -> Sizes:
        """Of every shared tensor, in their order. The same object as of an older snapshot: the same names, shapes and ``until``,
        too."""
        if self.known_sizes is None:
            self.known_sizes = [(name, t.numel(), t.element_size()) for name, t in self.shared.items()]
        return self.known_sizes

    def add(self, component: str, value: object) -> None:
        """Encode ``value`` as this rank's own state of ``component``. Raises ``UserError`` naming what cannot be stored."""
        self.add_made(component, lambda: encode(value, where=component))

    def add_made(self, component: str, make: Callable[[], tuple[Mapping[str, torch.Tensor], Any]]) -> None:
        """The same for a state that ``make`` encodes. Raises ``UserError``: what cannot be stored comes again in every save."""
        try:
            self.add_encoded(component, *make())
        except HookStateError as error:
            raise UserError(f"{error.key}: {error.detail}", code="state-unsaved") from error

    def add_encoded(self, component: str, tensors: Mapping[str, torch.Tensor], data: Any) -> None:
        """The same for a state that is tensors and JSON already."""
        self.state[component] = data
        for name, tensor in tensors.items():
            self.private[f"{component}/{name}"] = tensor

    def value(self, component: str, *, apart: Collection[str] = ()) -> Any:
        """Inverse of ``add``. ``apart``: parameters whose tensors of this component (``optimizer/<parameter>/<key>``) lie beside
        the value. Raises ``StateError`` when the component is missing or malformed."""
        tensors, data = self.encoded(component)
        tensors = {name: t for name, t in tensors.items() if name.rpartition("/")[0] not in apart}
        try:
            return decode(tensors, data)
        except HookStateError as error:
            raise StateError(f"{component}: {error.key}: {error.detail}") from error

    def encoded(self, component: str) -> tuple[Tensors, Any]:
        """Inverse of ``add_encoded``. Raises ``StateError`` when there is no such component."""
        if component not in self.state:
            raise StateError(f"{component}: the checkpoint has no state of that name")
        prefix = f"{component}/"
        return {n.removeprefix(prefix): t for n, t in self.private.items() if n.startswith(prefix)}, self.state[
            component
        ]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of Ratchet's own, without a copy."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, row-major, as they are stored."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def addresses(state: Any) -> Iterator[int]:
    """Where the tensors of a state begin in memory."""
    if isinstance(state, torch.Tensor):
        yield state.data_ptr()
    elif isinstance(state, (dict, list, tuple)):
        for item in state.values() if isinstance(state, dict) else state:
            yield from addresses(item)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """XXH3-128 in hex over the bytes of all tensors, row-major, in the given order. Only where no user code runs meanwhile."""
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        hasher.update(live_bytes(flat(tensor).cpu()).data)
    return hasher.hexdigest()


def empty(dtype: str, shape: Iterable[int]) -> torch.Tensor:
    """An uninitialised CPU tensor of a stored dtype. Raises ``StateError`` for one that this torch does not know."""
    if dtype not in DTYPES:
        raise StateError(f"dtype {dtype} is not known here")
    return torch.empty(tuple(shape), dtype=DTYPES[dtype])
