"""Tests that need a package which may not be installed: what would have them run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import pytest

_PIP: Final = {
    **{name: f"-e '.[{name}]'" for name in ("lightning", "accelerate", "transformers")},
    "sklearn": "-e '.[worker]'",
    "optimi": "torch-optimi",
}
"""Its name for pip, where that is another one."""


def missing_reason(package: str) -> str | None:
    """How to install it; None where it is there. It is found, not imported: every worker reads the tests."""
    return None if find_spec(package) else f"{package} is not installed: pip install {_PIP.get(package, package)}"


def skip_if_missing(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif((why := missing_reason(package)) is not None, reason=str(why))
