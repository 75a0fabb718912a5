"""A fresh virtual environment with what some of Ratchet's extras ask for, and nothing else that the tests' own has.

``python -m tests.support.virtual_environments DIRECTORY EXTRA,EXTRA``: the same with pip and without Ratchet, for pip to install
it there.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from deploy.constraints import closure

RATCHET = "ratchet-train"


def required_distributions(extras: set[str]) -> dict[str, Distribution]:
    """Ratchet with these extras and all that it asks for, by name. Raises ``PackageNotFoundError``."""
    return closure([f"{RATCHET}[{','.join(sorted(extras))}]"])


def environment_with_extras(directory: Path, extras: set[str]) -> Path:
    """The interpreter of a virtual environment in ``directory`` whose packages are links to those of this one."""
    return _link_distributions(directory, list(required_distributions(extras).values()))


def environment_with_requirements(directory: Path, requirements: list[str]) -> Path:
    """The same with these packages and what they require."""
    return _link_distributions(directory, list(closure(requirements).values()))


def _link_distributions(directory: Path, found: list[Distribution]) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (packages,) = directory.glob("lib/python3*/site-packages")
    for one in found:
        tops = {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (packages / top).is_symlink():
                (packages / top).symlink_to(Path(str(one.locate_file(top))))
    return directory / "bin" / "python"


def main(directory: Path, extras: set[str]) -> None:
    needed = required_distributions(extras)
    python = _link_distributions(
        directory, [distribution("pip"), *(one for name, one in needed.items() if name != RATCHET)]
    )
    pip = python.with_name("pip")
    pip.write_text(f'#!/bin/sh\nexec "{python}" -m pip "$@"\n')
    pip.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(sys.argv[2].split(",")))
