"""Prints deploy/constraints.txt: every package that the images install, in the version of the environment that this runs in.

python deploy/constraints.py > deploy/constraints.txt
python deploy/constraints.py --tests > constraints.txt  # what the tests need besides, for make
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
OURS: Final = ("ratchet-train", "ratchet-hooks")
OF_TORCH: Final = ("nvidia-", "cuda-", "triton")
"""What torch's CUDA build brings, each in one version that torch itself names."""
HEAD: Final = """\
# Every package that the images install beside Ratchet, without hashes: the CPU and the CUDA build of torch have the same name.
# Made by deploy/constraints.py, which says how to make it again.
"""
HEAD_OF_TESTS: Final = """\
# The versions that the tests run with, on Python 3.11: make installs these. Made by deploy/constraints.py --tests
-c deploy/constraints.txt
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


def main(arguments: list[str]) -> int:
    head, found = HEAD, closure([*requirements(), BUILD], OF_TORCH)
    if arguments == ["--tests"]:
        of_tests = closure([f"{OURS[0]}[dev]"], OF_TORCH)
        head, found = HEAD_OF_TESTS, {name: of_tests[name] for name in of_tests.keys() - found.keys() - set(OURS)}
    # without torch's +cpu
    print(head + "\n".join(f"{name}=={Version(one.version).public}" for name, one in sorted(found.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
