"""Finds the packages that an extra of Ratchet requires, by the installed distribution's metadata, and checks their versions."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Final

DISTRIBUTION: Final = "ratchet-train"
_REQUIREMENT: Final = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?(?P<wanted>[^;()]*)\)?\s*(?:;.*\bextra\s*==\s*['\"](?P<extra>[\w-]+)['\"].*)?"
)
_OPERATORS: Final[dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]]] = {
    ">=": operator.ge, "<=": operator.le, "<": operator.lt, ">": operator.gt, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


@dataclass(frozen=True)
class Package:
    """A package that Ratchet requires. ``required``: specifiers like ``<2.14,>=2.13``. ``installed``: None if the package is not
    installed."""

    name: str
    required: str
    installed: str | None

    @property
    def is_satisfied(self) -> bool:
        return self.installed is not None and satisfies(self.installed, self.required)


def required_packages(extra: str | None) -> list[Package]:
    """Return the packages that an extra of Ratchet, or with None Ratchet itself, requires directly. Raises
    ``PackageNotFoundError`` if Ratchet is not an installed distribution."""
    found = []
    for line in metadata.requires(DISTRIBUTION) or []:
        match = _REQUIREMENT.fullmatch(line.strip())
        if match is None or match["extra"] != extra or match["name"] == DISTRIBUTION:
            continue
        found.append(Package(match["name"], match["wanted"].strip(), _installed_version(match["name"])))
    return found


def _installed_version(name: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfies(version: str, specifiers: str) -> bool:
    """Return True if the release numbers of ``version`` satisfy all ``specifiers``, such as ``<2.14,>=2.13``. Other operators are
    ignored."""
    have = release_tuple(version)
    for specifier in filter(None, (part.strip() for part in specifiers.split(","))):
        match = re.match(r"(>=|<=|==|!=|<|>)\s*(.+)", specifier)
        if match is None:
            continue
        bound = release_tuple(match[2])
        width = max(len(have), len(bound))
        if not _OPERATORS[match[1]](_pad(have, width), _pad(bound, width)):
            return False
    return True


def release_tuple(version: str) -> tuple[int, ...]:
    """Return a version's release numbers: ``(2, 13, 0)`` for ``2.13.0+cu130``; empty if it has none."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _pad(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Return the numbers with zeros appended, ``width`` in all."""
    return numbers + (0,) * (width - len(numbers))
