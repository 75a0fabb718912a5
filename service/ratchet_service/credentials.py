"""Variables of the service's own environment that no job gets, neither inherited nor as a secret by another name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ratchet_contract import environment as names

_DATABASE: Final = frozenset({"DATABASE_URL", "PGPASSWORD", "PGPASSFILE", "PGUSER", "PGSERVICE", "PGSERVICEFILE"})
_BARE: Final = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ")
_BARE_KINDS: Final = ("LC_", "LD_", "PYTHON", "OMP_", "MKL_")


def withheld(environ: Mapping[str, str]) -> set[str]:
    """Ratchet's own variables, and what would open the database; a copy of its URL under any name too."""
    url = environ.get(names.DATABASE_URL)
    return {
        name
        for name, value in environ.items()
        if name.startswith("RATCHET_") or name in _DATABASE or name.endswith("_DATABASE_URL") or (url and value == url)
    }


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process gets that runs a user's code or interpreter."""
    kept = withheld(environ)
    return {name: value for name, value in environ.items() if name not in kept}


def bare(environ: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter needs to start, as the service has it, and nothing else: no credential of any kind."""
    return {k: v for k, v in inherited(environ).items() if k in _BARE or k.startswith(_BARE_KINDS)}
