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
    """What ``ratchet init`` writes or ``ratchet run`` submits for a command. ``spec``: the keys to set, without ``code.path`` and
    ``python``. ``python``: the interpreter or environment of the job; None: the service's own interpreter."""

    command: Command
    facts: Facts
    place: Place
    way: Way
    python: Path | None
    notes: list[Note]
    spec: dict[str, Any]

    def full_spec(self) -> dict[str, Any]:
        """Return a copy of ``spec`` with ``code.path`` and ``python`` added as absolute paths; ``python`` is left out if it is
        None."""
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
    """Return the proposal for the command ``words``: torchrun and its options, ``python train.py``, or only the script.
    ``environ``: the environment variables. ``overrides``: the keys of ``--set``, of which only ``code`` and ``python`` are used.
    ``code`` and ``name``: the values of ``--code`` and ``--name``. Raises ``Refused`` for what is not supported, and ``NotFound``
    if the script or the code directory does not exist. The script is read and not run; the job's interpreter is started to find
    out which modules it has, which blocks for at most 60 seconds. Counting GPUs (``nvidia-smi``), as for
    ``--nproc-per-node=auto``, may block as well."""
    command = parse_command(words, environ)
    place = project.locate(command.script, _code(overrides, code))
    facts = read_script.read_script(place.script, place.code)
    command = lightning_devices.with_devices(command, facts)
    python = _python(overrides) or project.environment_of(command.python, environ)
    way = advice.run_mode(facts, place)
    spec = render_yaml.make_spec(command, facts, place, way, name=name)
    return Proposal(command, facts, place, way, python, advice.notes(command, facts, place, python), spec)


def _code(overrides: Mapping[str, Any], code: Path | None) -> Path | None:
    """Return the code directory that ``--code`` (``code``) or ``--set code.path`` names; None if neither does. Raises ``Refused``
    if both name different directories, or if ``--set code`` is anything but a ``path`` that is not empty, ``include``, or
    both."""
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
    """Return the absolute path that ``--set python`` names; None if it is not set. Raises ``Refused`` if it is not text or is
    empty."""
    named = overrides.get("python")
    if named is not None and (not isinstance(named, str) or not named):
        raise Refused("--set python: name an interpreter, or the directory of an environment")
    return None if named is None else Path(named).expanduser().absolute()
