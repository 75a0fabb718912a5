"""Files that Accelerate and transformers write by ``torch.save``, read without running what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

_OF_GENERATORS: Final = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
"""numpy's are saved as arrays."""


def read_pickled(file: Path) -> Any:
    with torch.serialization.safe_globals(_OF_GENERATORS):
        return torch.load(file, weights_only=True)
