"""Prints deploy/constraints.txt: every package that the images install, in the version of the environment that this runs in.

python deploy/constraints.py > deploy/constraints.txt
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parents[1]
EXTRAS: Final = ("service", "worker", "postgres", "kubernetes", "s3")
"""All that any image may be built with (``EXTRAS`` of the Dockerfiles)."""
BUILD: Final = "hatchling"
OF_TORCH: Final = ("nvidia-", "cuda-", "triton")
"""What torch's CUDA build brings, each in one version that torch itself names."""
HEAD: Final = """\
# Every package that the images install beside Ratchet, without hashes: the CPU and the CUDA build of torch have the same name.
# Made by deploy/constraints.py, which says how to make it again.
"""


def closure(requirements: Iterable[str], without: tuple[str, ...] = ()) -> dict[str, Distribution]:
    """What is installed of these and of all that they need, by name; ``without`` those whose name begins so. Raises
    ``PackageNotFoundError`` for one that is missing."""
    todo = [Requirement(line) for line in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    found: dict[str, Distribution] = {}
    while todo:
        wanted = todo.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen or name.startswith(without):
            continue
        seen.add((name, extras))
        found[name] = distribution(name)
        for line in found[name].requires or ():
            further = Requirement(line)
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                todo.append(further)
    return found


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in EXTRAS for line in optional[extra])]


def main() -> int:
    found = closure([*requirements(), BUILD], OF_TORCH)
    # without torch's +cpu
    print(HEAD + "\n".join(f"{name}=={Version(one.version).public}" for name, one in sorted(found.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
