"""A process's global generators (torch on CPU and CUDA, numpy, ``random``), as state that ``ratchet_hooks.state.encode``
accepts."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import torch

from ratchet_hooks.errors import HookStateError


def capture(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's, numpy's and Python's global generators; ``cuda`` is None if ``device`` is no CUDA device."""
    version, words, gauss = random.getstate()
    return {
        **capture_torch(device),
        "numpy": np.random.get_state(legacy=False),
        "python": (version, torch.frombuffer(array("q", words), dtype=torch.int64), gauss),
    }


def capture_torch(device: torch.device) -> dict[str, Any]:
    """Return only the states of torch's generators."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to the states that ``capture`` returned. Raises ``HookStateError`` if ``state`` is of another kind of
    device."""
    if (state["cuda"] is None) != (device.type != "cuda"):
        had = "without" if state["cuda"] is None else "with"
        raise HookStateError(
            "rng.cuda", f"the checkpoint was written {had} a CUDA device, this rank runs on {device.type}"
        )
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    restore_torch(state, device)


def restore_torch(state: dict[str, Any], device: torch.device) -> None:
    """Set only torch's generators to the states that ``capture`` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
