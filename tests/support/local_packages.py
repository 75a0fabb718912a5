"""Packages that pip installs without an index: a wheel, and an sdist whose build runs code of the test."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Final

PYPROJECT: Final = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
BACKEND: Final = """
from pathlib import Path
from findings import find
from local_packages import make_wheel

def build_wheel(folder, settings=None, metadata=None):
    return make_wheel(Path(folder), {name!r}, {version!r}, f"FOUND = {{find()!r}}")
"""


def make_wheel(folder: Path, name: str, version: str, source: str) -> str:
    """A wheel with one module; returns the file's name."""
    info, file = f"{name}-{version}.dist-info", f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / file, "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return file


def make_sdist(folder: Path, name: str, version: str, find: str) -> None:
    """An sdist whose build runs the code ``find`` and calls its function ``find()``. The installed module has what it returned as
    ``FOUND``."""
    files = {"pyproject.toml": PYPROJECT, "backend.py": BACKEND.format(name=name, version=version), "findings.py": find}
    files["local_packages.py"] = Path(__file__).read_text()
    files["PKG-INFO"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with tarfile.open(folder / f"{name}-{version}.tar.gz", "w:gz") as archive:
        for file, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{file}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
