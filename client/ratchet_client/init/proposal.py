"""From the command that a user trains with to what ``ratchet init`` writes, and ``ratchet run`` submits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet_client.init import advice, devices, project, reading, spec_yaml
from ratchet_client.init.advice import Note, Way
from ratchet_client.init.command import Command, parse_command
from ratchet_client.init.facts import Facts
from ratchet_client.init.project import Place
from ratchet_contract.errors import Refused


@dataclass(frozen=True)
class Proposal:
    """``spec``: the keys that are set, without ``code.path`` and ``python``. ``python``: None: the service's own interpreter."""

    command: Command
    facts: Facts
    place: Place
    way: Way
    python: Path | None
    notes: list[Note]
    spec: dict[str, Any]

    def whole_spec(self) -> dict[str, Any]:
        """With ``code`` and ``python``, paths absolute."""
        python = {} if self.python is None else {"python": str(self.python)}
        return {**self.spec, "code": {"path": str(self.place.code), **self.spec.get("code", {})}} | python


def propose(
    words: Sequence[str], environ: Mapping[str, str], given: Mapping[str, Any], *, code: Path | None, name: str | None
) -> Proposal:
    """``words`` as typed: torchrun and its options, ``python train.py``, or the script. ``given``: what ``--set`` sets, of which
    only ``code`` and ``python`` are looked at. Raises ``Refused``, ``NotFound``."""
    command = parse_command(words, environ)
    place = project.locate(command.script, _code(given, code))
    facts = reading.read_script(place.script, place.code)
    command = devices.with_devices(command, facts)
    python = _python(given) or project.environment_of(command.python, environ)
    way = advice.way_of(facts, place)
    spec = spec_yaml.make_spec(command, facts, place, way, name=name)
    return Proposal(command, facts, place, way, python, advice.notes(command, facts, place, python), spec)


def _code(given: Mapping[str, Any], code: Path | None) -> Path | None:
    """The directory that ``--code`` or ``--set code.path`` names. Raises ``Refused``."""
    named = given.get("code", {})
    path = named.get("path") if isinstance(named, dict) else None
    if "code" not in given or (isinstance(named, dict) and set(named) == {"include"}):
        return code
    if not isinstance(path, str) or not path or set(named) - {"path", "include"}:
        raise Refused(
            "--set code: init makes a snapshot of a directory: name it by --set code.path=DIR, or by --code DIR"
        )
    if code is not None and code.expanduser().resolve() != Path(path).expanduser().resolve():
        raise Refused(f"--code {code} and --set code.path={path} name two directories: leave one out")
    return Path(path)


def _python(given: Mapping[str, Any]) -> Path | None:
    """What ``--set python`` names. Raises ``Refused``."""
    named = given.get("python")
    if named is not None and (not isinstance(named, str) or not named):
        raise Refused("--set python: name an interpreter, or the directory of an environment")
    return None if named is None else Path(named).expanduser().absolute()
