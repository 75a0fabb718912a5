"""Compare two checkpoints bit for bit. The public import path of ``ratchet_store.read.compare``."""

import sys

from ratchet_store.read.compare import (
    Comparison,
    ComponentSummary,
    JsonValue,
    StateDifference,
    TensorComparison,
    compare,
    compare_opened,
    component_of,
    count_differences,
    main,
    render,
    same_files,
)

__all__ = [
    "Comparison",
    "ComponentSummary",
    "JsonValue",
    "StateDifference",
    "TensorComparison",
    "compare",
    "compare_opened",
    "component_of",
    "count_differences",
    "main",
    "render",
    "same_files",
]

if __name__ == "__main__":
    sys.exit(main())
