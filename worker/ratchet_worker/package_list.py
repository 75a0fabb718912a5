"""Which packages this interpreter has, as ``name==version``, and which of them are others than when a checkpoint was made.

Names and versions are those of the directories ``NAME-VERSION.dist-info`` on the import path, where the first of a name counts:
``importlib.metadata`` reads and parses a file of each, which takes a rank with 160 packages half a second. Of a package that was
installed from a repository or a file the commit or the file's digest follows (``name==version@COMMIT``), of an editable one
``@editable``: its files are not looked at, nor are those of any other package. Ratchet itself is not in the list: its version is
recorded beside it, and a checkpoint has the same meaning for all that read its format.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final

from ratchet_contract.resume import EnvironmentDifference

OWN: Final = ("ratchet-train", "ratchet-hooks")
EDITABLE: Final = "editable"
_SUFFIXES: Final = (".dist-info", ".egg-info")
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""Of a package; not of what pip leaves beside one that it replaces (``~ip-23.0.dist-info``)."""
_SEPARATORS: Final = re.compile(r"[-_.]+")


def installed(folders: Sequence[str] | None = None) -> list[str]:
    """``name==version`` of each, sorted; the name in its normal form (``scikit-learn``). ``folders``: an import path; None: this
    process's."""
    found: dict[str, str] = {}
    for folder in map(Path, sys.path if folders is None else folders):
        try:
            names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _SUFFIXES)
        except OSError:  # a zip file, or not there
            continue
        for name, version in (_name_and_version(folder / entry) for entry in names):
            if _NAME.fullmatch(name):
                found.setdefault(_SEPARATORS.sub("-", name).lower(), version)
    for name in OWN:
        found.pop(name, None)
    return sorted(f"{name}=={version}" for name, version in found.items())


def _name_and_version(place: Path) -> tuple[str, str]:
    name, _, version = place.stem.partition("-")
    if place.suffix == ".egg-info":  # NAME.egg-info, NAME-VERSION-py3.11.egg-info
        with suppress(OSError, ValueError, KeyError):
            meta = Distribution.at(place).metadata
            name, version = meta["Name"] or name, meta["Version"] or version
    return name, (version or "unknown") + _source(place)


def _source(place: Path) -> str:
    """``@`` and what tells two installations of one version apart, where the installer has recorded it; else empty."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        told = json.loads((place / "direct_url.json").read_bytes())
        if told.get("dir_info", {}).get("editable"):
            return f"@{EDITABLE}"
        found = told.get("vcs_info", {}).get("commit_id") or told.get("archive_info", {}).get("hashes", {}).get(
            "sha256"
        )
        return f"@{found}" if found and " " not in found else ""
    return ""


def editable(packages: Sequence[str]) -> list[str]:
    """Names of those whose code may change without a trace in the list."""
    return [package.partition("==")[0] for package in packages if package.endswith(f"@{EDITABLE}")]


def digest(packages: Sequence[str]) -> str:
    """Hex SHA-256 of the list, one package a line."""
    return hashlib.sha256("\n".join(packages).encode()).hexdigest()


def changes(recorded: Sequence[str], current: Sequence[str], named: Collection[str]) -> list[EnvironmentDifference]:
    """One difference for each package that was added, removed or is of another version, with the key ``package:NAME``. Left out
    is what a fact of its own tells of (``named``, by name: torch, numpy)."""
    then, now = dict(map(_split, recorded)), dict(map(_split, current))
    return [
        EnvironmentDifference(key=f"package:{name}", recorded=then.get(name), current=now.get(name))
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name) and name not in named
    ]


def _split(package: str) -> tuple[str, str]:
    name, _, version = package.partition("==")
    return name, version
