"""A fresh virtual environment with Ratchet and what some of its extras ask for, nothing else that the tests' own has."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(extras: set[str]) -> dict[str, Distribution]:
    """``ratchet-train`` with these extras and all that it asks for, by name. Raises ``PackageNotFoundError``."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [("ratchet-train", frozenset(extras))]
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        found[name] = distribution(name)
        for line in found[name].requires or ():
            asked = Requirement(line)
            if asked.marker is None or any(asked.marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                waiting.append((canonicalize_name(asked.name), frozenset(asked.extras)))
    return found


def environment(directory: Path, extras: set[str]) -> Path:
    """The interpreter of a virtual environment in ``directory`` whose packages are links to those of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (packages,) = directory.glob("lib/python3*/site-packages")
    for found in required(extras).values():
        tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (packages / top).is_symlink():
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
    return directory / "bin" / "python"
