"""The packages of this interpreter, without Ratchet's own. Most are read from names of directories: ``importlib.metadata``, which
parses each, takes half a second with 160."""

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

from ratchet_contract.checkpoint.resume_report import EnvironmentDifference

OWN: Final = ("ratchet-train", "ratchet-hooks")
EDITABLE: Final = "editable"
_SUFFIXES: Final = (".dist-info", ".egg-info")
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""The name of a package, unlike what pip leaves when it replaces one (``~ip-23.0.dist-info``)."""
_SEPARATORS: Final = re.compile(r"[-_.]+")


def installed(folders: Sequence[str] | None = None) -> list[str]:
    """Return ``name==version`` of each installed package, sorted, without Ratchet's own. A suffix such as ``@COMMIT`` may follow.
    ``folders``: an import path; None: this process's."""
    found: dict[str, str] = {}
    for folder in map(Path, sys.path if folders is None else folders):
        try:
            names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _SUFFIXES)
        except OSError:  # a zip file, or missing
            continue
        for name, version in (_name_and_version(folder / entry) for entry in names):
            if _NAME.fullmatch(name):
                found.setdefault(_SEPARATORS.sub("-", name).lower(), version)
    for name in OWN:
        found.pop(name, None)
    return sorted(f"{name}=={version}" for name, version in found.items())


def _name_and_version(place: Path) -> tuple[str, str]:
    """Return name and version of the package whose metadata is at ``place``. The version includes ``_source_suffix``."""
    name, _, version = place.stem.partition("-")
    if place.suffix == ".egg-info":  # NAME.egg-info, NAME-VERSION-py3.11.egg-info
        with suppress(OSError, ValueError, KeyError):
            meta = Distribution.at(place).metadata
            name, version = meta["Name"] or name, meta["Version"] or version
    return name, (version or "unknown") + _source_suffix(place)


def _source_suffix(place: Path) -> str:
    """Return what distinguishes this installation from others of the same version, such as ``@COMMIT``; empty if nothing usable
    is recorded."""
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
    """Return the names of those ``packages`` that are installed as editable."""
    return [package.partition("==")[0] for package in packages if package.endswith(f"@{EDITABLE}")]


def digest(packages: Sequence[str]) -> str:
    """Return the hex SHA-256 of the list of packages, one package a line."""
    return hashlib.sha256("\n".join(packages).encode()).hexdigest()


def changes(recorded: Sequence[str], current: Sequence[str], excluded: Collection[str]) -> list[EnvironmentDifference]:
    """Return a difference, with the key ``package:NAME``, for each package that was added, removed or has another version or
    suffix, except ``excluded``; sorted by name."""
    then, now = dict(map(_split, recorded)), dict(map(_split, current))
    return [
        EnvironmentDifference(key=f"package:{name}", recorded=then.get(name), current=now.get(name))
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name) and name not in excluded
    ]


def _split(package: str) -> tuple[str, str]:
    """Return name and version of ``name==version``."""
    name, _, version = package.partition("==")
    return name, version
