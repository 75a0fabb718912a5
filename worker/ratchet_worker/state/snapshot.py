"""One rank's whole state at a step boundary, split into tensors that are equal on all ranks and this rank's own.

Names: ``shared/model/<parameter>``, ``shared/optimizer/<parameter>/<key>``; private: ``rank/<r>/<component>/<path>``. If the
hook lets replicas differ, the first group is private too, and so are parameters that DDP ignores. Everything that is not a tensor
is in the rank file's JSON state, one entry per component, as ``ratchet_hooks.state.encode`` writes it.
"""

from __future__ import annotations

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
    """How long after the step boundary a captured tensor stays unchanged.

    ``BOUNDARY``: it may change at once (buffers, which the forward pass changes). ``BACKWARD``: until the next backward pass
    calls the hook (the hook's state). ``STEP``: until the next ``optimizer.step()`` (parameters that an optimizer trains, and the
    optimizers' tensors).
    """

    BOUNDARY = 0
    BACKWARD = 1
    STEP = 2


@dataclass
class Snapshot:
    """One rank's captured state.

    ``shared`` and ``private``: tensors by name without prefix (``model/weight``, ``rng/torch``). ``state``: everything else as
    JSON, by component. ``until``: by the same names, for tensors that stay unchanged beyond the boundary; the others are
    ``Until.BOUNDARY``. ``known_sizes``: the result of ``sizes``, if it is known already.
    """

    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    private: Tensors = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    until: Mapping[str, Until] = field(default_factory=dict)
    known_sizes: Sizes | None = None

    def sizes(self) -> Sizes:
        """Return name, number of elements and bytes per element of all shared tensors, in order.

        If two snapshots return the same object, names, shapes and ``until`` of their shared tensors are the same, too.
        """
        if self.known_sizes is None:
            self.known_sizes = [(name, t.numel(), t.element_size()) for name, t in self.shared.items()]
        return self.known_sizes

    def add(self, component: str, value: object) -> None:
        """Encode ``value``, and add it as this rank's own state of ``component``. Raises ``UserError`` naming what cannot be
        stored."""
        self.add_with(component, lambda: encode(value, root=component))

    def add_with(self, component: str, make: Callable[[], tuple[Mapping[str, torch.Tensor], Any]]) -> None:
        """Add the tensors and JSON that ``make`` returns as the state of ``component``. Raises ``UserError`` if ``make`` raises
        ``HookStateError``: that would recur in every save."""
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
        """Return the decoded value of ``component``, the inverse of ``add``.

        ``exclude``: names of parameters whose tensors of this component (``optimizer/<parameter>/<key>``) are not part of the
        value. Raises ``StateError`` if the component is missing or malformed.
        """
        tensors, data = self.encoded(component)
        tensors = {name: t for name, t in tensors.items() if name.rpartition("/")[0] not in exclude}
        try:
            return decode(tensors, data)
        except HookStateError as error:
            raise StateError(f"{component}: {error.key}: {error.detail}") from error

    def encoded(self, component: str) -> tuple[Tensors, Any]:
        """Return the private tensors, by name within the component, and the JSON of ``component``, the inverse of
        ``add_encoded``. Raises ``StateError`` if the component is missing."""
        if component not in self.state:
            raise StateError(f"{component}: the checkpoint has no state of that name")
        prefix = f"{component}/"
        return {n.removeprefix(prefix): t for n, t in self.private.items() if n.startswith(prefix)}, self.state[
            component
        ]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a view that shares its memory. Only for tensors that Ratchet owns: their
    storage cannot be resized afterwards."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``tensor`` as a 1-D tensor, row-major: the form in which a checkpoint stores them. A view where
    possible, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def tensor_addresses(state: Any) -> Iterator[int]:
    """Yield the memory addresses of all tensors in a state, at any depth of dicts, lists and tuples."""
    if isinstance(state, torch.Tensor):
        yield state.data_ptr()
    elif isinstance(state, (dict, list, tuple)):
        for item in state.values() if isinstance(state, dict) else state:
            yield from tensor_addresses(item)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return the hex XXH3-128 over the bytes of all tensors, row-major, one after the other. No user code, which could free their
    memory, may run meanwhile."""
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        hasher.update(live_bytes(flat(tensor).cpu()).data)
    return hasher.hexdigest()


def empty(dtype: str, shape: Iterable[int]) -> torch.Tensor:
    """Return an uninitialised CPU tensor. ``dtype``: its name as it is stored. Raises ``StateError`` for a name that
    ``DTYPES`` does not have."""
    if dtype not in DTYPES:
        raise StateError(f"dtype {dtype} is not known here")
    return torch.empty(tuple(shape), dtype=DTYPES[dtype])
