"""Downloads the wheels that the GPU machine's Python (x86-64) lacks: ``python -m tests.gpu.wheels --to DIR``."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

from tests.gpu.packages import CARRIED, LIMIT, PRESENT, ROOTS, canonical

_PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"
RECORD: Final = Path(__file__).with_name("wheels.txt")
"""Size in bytes and name of each wheel of the last download for ``_USUAL``."""
_USUAL: Final = "3.12"
_PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


class Incomplete(Exception):
    """The wheels are not the expected ones, or too large."""


def requirements() -> list[str]:
    """``ROOTS`` with the versions that ``pyproject.toml`` asks for."""
    project = tomllib.loads(_PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["service"], *extras["worker"]]
    by_name = {canonical(re.split(r"[^\w.-]", line, maxsplit=1)[0]): line for line in lines}
    return [by_name[name] for name in ROOTS]


def wheel_name(file: Path) -> str:
    return canonical(file.name.partition("-")[0])


def download(to: Path, python: str) -> list[Path]:
    """The wheels for a version of Python (``3.12``), in ``to``, by name. Raises ``Incomplete`` and
    ``subprocess.CalledProcessError``."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", folder]
        command += ["--implementation", "cp", "--python-version", python]
        command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
        subprocess.run([*command, *requirements()], check=True)
        found = {wheel_name(file): file for file in Path(folder).glob("*.whl")}
        if strange := found.keys() - PRESENT - CARRIED:
            raise Incomplete(f"{', '.join(sorted(strange))}: add to CARRIED in tests/gpu/packages.py")
        if missing := CARRIED - found.keys():
            raise Incomplete(
                f"{', '.join(sorted(missing))}: not downloaded; remove from CARRIED in tests/gpu/packages.py"
            )
        for old in to.glob("*.whl"):
            old.unlink()
        wheels = [file.rename(to / file.name) for name, file in sorted(found.items()) if name in CARRIED]
    total = sum(file.stat().st_size for file in wheels)
    if total > LIMIT:
        raise Incomplete(f"{total} bytes of wheels, {LIMIT} may travel")
    return wheels


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.wheels", description=__doc__)
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="old wheels in it are removed")
    parser.add_argument("--python", default=_USUAL, metavar="X.Y", help="version of its Python (default: %(default)s)")
    given = parser.parse_args()
    try:
        wheels = download(given.to, given.python)
    except (Incomplete, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    lines = [f"{file.stat().st_size} {file.name}" for file in wheels]
    print(*lines, sep="\n")
    print(
        f"{sum(file.stat().st_size for file in wheels):,d} bytes in {len(wheels)} wheels, at most {LIMIT:,d} may travel"
    )
    if given.python == _USUAL:
        RECORD.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
