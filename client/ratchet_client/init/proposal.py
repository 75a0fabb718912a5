"""Derives what ``ratchet init`` writes, and ``ratchet run`` submits, from the command that a user trains with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet_client.init import advice, lightning_devices, project, read_script, render_yaml
from ratchet_client.init.advice import Note, Way
from ratchet_client.init.command_line import Command, parse_command
from ratchet_client.init.project import Place
from ratchet_client.init.script_facts import Facts
from ratchet_contract.errors import Refused


@dataclass(frozen=True)
class Proposal:
    """What ``ratchet init`` proposes for a command. ``spec``: its keys without ``code.path`` and ``python``. ``python``: the
    job's interpreter or environment; None: the service's."""

    command: Command
    facts: Facts
    place: Place
    way: Way
    python: Path | None
    notes: list[Note]
    spec: dict[str, Any]

    def full_spec(self) -> dict[str, Any]:
        """Return a copy of ``spec`` with ``code.path`` and, unless it is None, ``python`` as absolute paths."""
        python = {} if self.python is None else {"python": str(self.python)}
        return {**self.spec, "code": {"path": str(self.place.code), **self.spec.get("code", {})}} | python


def propose(
    words: Sequence[str],
    environ: Mapping[str, str],
    overrides: Mapping[str, Any],
    *,
    code: Path | None,
    name: str | None,
) -> Proposal:
    """Return the proposal for the user's training command ``words``. ``overrides``: the values of ``--set`` by key; only ``code``
    and ``python`` are used. Runs the job's interpreter, which may block for a minute. Raise ``Refused``, ``NotFound`` or
    ``SpecError`` for an unusable command."""
    command = parse_command(words, environ)
    place = project.locate(command.script, _code(overrides, code))
    facts = read_script.read_script(place.script, place.code)
    command = lightning_devices.with_devices(command, facts)
    python = _python(overrides) or project.environment_of(command.python, environ)
    way = advice.run_mode(facts, place)
    spec = render_yaml.make_spec(command, facts, place, way, name=name)
    return Proposal(command, facts, place, way, python, advice.notes(command, facts, place, python), spec)


def _code(overrides: Mapping[str, Any], code: Path | None) -> Path | None:
    """Return the code directory that ``--code`` or ``--set code.path`` names; None if neither does. Raise ``Refused`` if they
    cannot be used."""
    named = overrides.get("code", {})
    path = named.get("path") if isinstance(named, dict) else None
    if "code" not in overrides or (isinstance(named, dict) and set(named) == {"include"}):
        return code
    if not isinstance(path, str) or not path or set(named) - {"path", "include"}:
        raise Refused(
            "--set code: init makes a snapshot of a directory: name it by --set code.path=DIR, or by --code DIR"
        )
    if code is not None and code.expanduser().resolve() != Path(path).expanduser().resolve():
        raise Refused(f"--code {code} and --set code.path={path} name two directories: leave one out")
    return Path(path)


def _python(overrides: Mapping[str, Any]) -> Path | None:
    """Return the absolute path that ``--set python`` names; None if it is not set. Raise ``Refused`` if it is not a path."""
    named = overrides.get("python")
    if named is not None and (not isinstance(named, str) or not named):
        raise Refused("--set python: name an interpreter, or the directory of an environment")
    return None if named is None else Path(named).expanduser().absolute()
