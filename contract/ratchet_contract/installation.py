"""Which packages of an extra are installed in this interpreter, in which versions, and whether these are the ones asked for.

What is asked for is read from the installed distribution's own metadata, so that it stands in ``pyproject.toml`` alone.
"""

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
    """``wanted``: version specifiers like ``<2.14,>=2.13``; ``found``: the installed version, None where there is none."""

    name: str
    wanted: str
    found: str | None

    @property
    def fits(self) -> bool:
        return self.found is not None and satisfies(self.found, self.wanted)


def packages(extra: str) -> list[Package]:
    """The direct requirements of one extra. Raises ``importlib.metadata.PackageNotFoundError`` where Ratchet runs uninstalled."""
    found = []
    for line in metadata.requires(DISTRIBUTION) or []:
        match = _REQUIREMENT.fullmatch(line.strip())
        if match is None or match["extra"] != extra or match["name"] == DISTRIBUTION:
            continue
        found.append(Package(match["name"], match["wanted"].strip(), _version(match["name"])))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def satisfies(version: str, wanted: str) -> bool:
    """Release numbers only, which is all that our requirements use: ``2.13.0+cu130`` is 2.13.0."""
    have = release(version)
    for specifier in filter(None, (part.strip() for part in wanted.split(","))):
        match = re.match(r"(>=|<=|==|!=|<|>)\s*(.+)", specifier)
        if match is None:
            continue
        bound = release(match[2])
        width = max(len(have), len(bound))
        if not _OPERATORS[match[1]](_padded(have, width), _padded(bound, width)):
            return False
    return True


def release(version: str) -> tuple[int, ...]:
    """``(2, 13, 0)`` of ``2.13.0+cu130``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _padded(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    return numbers + (0,) * (width - len(numbers))
