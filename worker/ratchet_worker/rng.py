"""Every generator a rank draws from (torch on CPU and CUDA, numpy, ``random``): seeded per rank, restored bit for bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ratchet_contract.errors import StateError


def derive_seed(seed: int, *parts: str | int, bits: int = 63) -> int:
    """A seed of ``bits`` bits that is a pure function of ``seed`` and ``parts``: SHA-256 of their text, cut."""
    text = ":".join(str(p) for p in ("ratchet", seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - bits)


def seed_all(seed: int, rank: int) -> None:
    """Seed all generators of this process as a function of (seed, rank). ``torch.manual_seed`` seeds every CUDA device too."""
    torch.manual_seed(derive_seed(seed, "torch", rank))
    np.random.seed(derive_seed(seed, "numpy", rank, bits=32))
    random.seed(derive_seed(seed, "python", rank))


def capture(device: torch.device) -> dict[str, Any]:
    """State of all generators as tensors and numbers. Keys: torch, cuda (None without), numpy, python."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    words = numpy_state["state"]
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": {
            "bit_generator": str(numpy_state["bit_generator"]),
            "key": torch.from_numpy(words["key"].astype(np.int64)),
            "pos": int(words["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "python": {
            "version": version,
            "key": torch.tensor(internal, dtype=torch.int64),
            "gauss": gauss,
        },
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put ``capture``'s state back. Raises ``StateError`` where a GPU was there and is not, or is and was not."""
    if (state["cuda"] is None) != (device.type != "cuda"):
        had = "without" if state["cuda"] is None else "with"
        raise StateError(f"rng.cuda: the checkpoint was written {had} a CUDA device, this rank runs on {device.type}")
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["key"].tolist()), python["gauss"]))
    np.random.set_state(
        {
            "bit_generator": numpy_state["bit_generator"],
            "state": {"key": numpy_state["key"].numpy().astype(np.uint32), "pos": numpy_state["pos"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        }
    )
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """What is drawn inside leaves no trace: all generators are as before afterwards, also after an exception."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)


class GeneratorState:
    """Gives a ``torch.Generator`` or ``numpy.random.Generator`` the ``state_dict`` that it lacks."""

    def __init__(self, generator: torch.Generator | np.random.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self._generator, torch.Generator):
            return {"torch": self._generator.get_state()}
        return {"numpy": _plain(self._generator.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        if isinstance(self._generator, torch.Generator):
            self._generator.set_state(state["torch"])
        else:
            self._generator.bit_generator.state = _with_arrays(state["numpy"])


def _plain(value: Any) -> Any:
    """numpy's nested state with arrays as int64 tensors (their words are at most 32 bits) and big integers as hex text."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(value.astype(np.int64)), "dtype": str(value.dtype)}
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 62:
        return {"hex": hex(value)}
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"array", "dtype"}:
            return value["array"].numpy().astype(value["dtype"])
        return int(value["hex"], 16) if set(value) == {"hex"} else {k: _with_arrays(v) for k, v in value.items()}
    return value
