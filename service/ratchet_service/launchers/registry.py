"""Launchers by name: Ratchet's own, and those that other packages provide by the entry point group ``ratchet.launchers``. A
service's launchers file (YAML), if it has one, maps the names of its launchers to their settings. Without the file, the service
has the launcher ``local``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, cast

import yaml

from ratchet_contract.paths import HomePaths
from ratchet_service.config.standby_bounds import OFF, StandbyBounds
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox
from ratchet_service.launchers.base import Launcher
from ratchet_service.launchers.engine_thread import ThreadedLauncher

LAUNCHERS: Final[dict[str, str]] = {
    "local": "ratchet_service.launchers.local:make",
    "kubernetes": "ratchet_service.launchers.kubernetes.launcher:make",
    "slurm": "ratchet_service.launchers.slurm.launcher:make",
}
GROUP: Final = "ratchet.launchers"
"""Entry points of other packages: name -> ``make(home: HomePaths, settings: Mapping[str, Any]) -> Launcher``."""


class Launchers(Mapping[str, Launcher]):
    """The launchers that a service has, by name. Read-only."""

    def __init__(self, launchers: Mapping[str, Launcher]) -> None:
        self._launchers = dict(launchers)

    def __getitem__(self, kind: str) -> Launcher:
        return self._launchers[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._launchers)

    def __len__(self) -> int:
        return len(self._launchers)


def load(home: HomePaths, file: Path | None, sandbox: Sandbox = NO_SANDBOX, standby: StandbyBounds = OFF) -> Launchers:
    """Return the launchers that the launchers file ``file`` names; None: only ``local``. Raises ``ValueError`` with a message for
    users."""
    settings: Mapping[str, Mapping[str, Any]] = {"local": {}} if file is None else _read(file)
    made = {kind: _make(kind, home, given, sandbox, standby) for kind, given in settings.items()}
    return Launchers(
        {kind: launcher if launcher.slots else ThreadedLauncher(launcher) for kind, launcher in made.items()}
    )


def _read(file: Path) -> dict[str, Mapping[str, Any]]:
    """Return launcher's name -> settings, from the launchers file. Raises ``ValueError`` if the file cannot be used."""
    try:
        data = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"the launchers file {file} cannot be read: {error}") from None
    if not isinstance(data, dict) or not data:
        raise ValueError(f"the launchers file {file} must be a mapping, such as `local: {{}}`")
    out: dict[str, Mapping[str, Any]] = {}
    for kind, given in data.items():
        if not isinstance(given, dict | None):
            raise ValueError(f"{file}: the settings of {kind} must be a mapping (`{{}}` for none), not {given!r}")
        out[str(kind)] = given or {}
    return out


def _make(
    kind: str, home: HomePaths, settings: Mapping[str, Any], sandbox: Sandbox, standby: StandbyBounds
) -> Launcher:
    """Return the launcher with this name. Raises ``ValueError`` if it is unknown, cannot be imported, or refuses ``settings``."""
    brought = {point.name: point for point in entry_points(group=GROUP)}
    try:
        if kind in LAUNCHERS:
            module, _, factory = LAUNCHERS[kind].partition(":")
            make = getattr(import_module(module), factory)
        elif kind in brought:
            make = brought[kind].load()
        else:
            known = ", ".join([*LAUNCHERS, *sorted(brought)])
            raise ValueError(f"there is no launcher {kind!r}; known: {known}")
    except ImportError as error:
        raise ValueError(f"the launcher {kind} cannot be loaded: {error}") from None
    more = (sandbox, standby) if kind == "local" else ()
    return cast(Launcher, make(home, settings, *more))
