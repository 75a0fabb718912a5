"""The Python packages of the GPU machine, and those that travel to it as wheels. Standard library only."""

from __future__ import annotations

import re
from typing import Final

PRESENT: Final = frozenset(
    """
    absl-py accelerate annotated-doc anyio certifi click filelock fsspec h11 httpcore httpx huggingface-hub hypothesis idna
    jinja2 lightning lightning-utilities markdown-it-py markupsafe mdurl networkx numpy packaging pillow pip pluggy portalocker
    prometheus-client psutil pygments pytest pytest-timeout pytest-xdist pyyaml regex requests rich safetensors scikit-learn
    scipy setuptools shellingham sympy tensorboard threadpoolctl timm tokenizers torch torchmetrics torchvision tqdm
    transformers triton typer typing-inspect urllib3 wheel xxhash
    """.split()  # noqa: SIM905
)
"""Distributions that the GPU machine's Python has already."""

ROOTS: Final = ("pydantic", "fastapi", "uvicorn", "sqlalchemy", "alembic", "pathspec", "httpx-sse")
"""Direct requirements of Ratchet that the machine lacks. Their versions are those that ``pyproject.toml`` asks for."""

CARRIED: Final = frozenset(
    """
    alembic annotated-types fastapi httpx-sse mako opentelemetry-api pathspec pydantic pydantic-core sqlalchemy starlette
    typing-extensions typing-inspection uvicorn
    """.split()  # noqa: SIM905
)
"""``ROOTS`` and what they require, without ``PRESENT``. typing-extensions is on the machine, but pydantic wants the newest."""

OBSTACLE: Final = "no row can run"
"""Among the facts of the inventory: why, and the cure."""

LIMIT: Final = 64 << 20
"""Bytes that may travel to the machine in one call."""


def canonical(name: str) -> str:
    """A distribution's name in the one spelling that compares equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
