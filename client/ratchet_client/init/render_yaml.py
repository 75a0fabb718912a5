"""Renders the spec as commented YAML text, and validates it."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from ratchet_client.init.advice import Note, Way, device_of, hook_block
from ratchet_client.init.command_line import Command
from ratchet_client.init.project import Place
from ratchet_client.init.script_facts import Facts
from ratchet_contract.errors import Refused
from ratchet_contract.spec.parse import load_spec_text, parse_spec

_WIDTH: Final = 118
_MADE: Final = "made by `ratchet init`"
_EXAMPLE: Final = {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 100}


def make_spec(command: Command, facts: Facts, place: Place, way: Way, *, name: str | None) -> dict[str, Any]:
    """Return the proposed spec, without the keys ``code`` and ``python``. ``name``: the job's name; None: derived from the
    script's name. Raise ``Refused`` or ``SpecError`` for command arguments that the task cannot take."""
    spec: dict[str, Any] = {"name": name or _label(place.script.stem)}
    if way == "task":
        assert facts.task is not None
        module = place.relative.removesuffix(".py").replace("/", ".")
        arguments = _task_arguments(command.arguments, facts.task[1], facts.task[0])
        spec["task"] = {"entrypoint": f"{module}:{facts.task[0]}", "args": arguments}
    else:
        spec["script"] = [place.relative, *command.arguments]
    if command.env:
        spec["env"] = command.env
    spec["world"] = {"ranks_per_node": command.ranks, "device": device_of(command, facts)}
    if command.policy:
        spec["policy"] = dict(command.policy)
    blocks = [block for hook in facts.hooks if (block := hook_block(hook))]
    if way != "unmanaged" and blocks:
        spec["hook"] = blocks[0]
    return spec


def _label(stem: str) -> str:
    """Return a valid job name for a file's name without its suffix."""
    words = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return (words if words[:1].isalpha() else f"job-{words}".rstrip("-"))[:63].rstrip("-")


def _task_arguments(words: Sequence[str], known: Sequence[str], task: str) -> dict[str, Any]:
    """Return the arguments ``words`` as a dict: ``--lr 0.1`` as ``{"lr": 0.1}``, a bare option as True. Raise ``Refused`` for one
    that is not in ``known``, ``SpecError`` for a value that is not YAML. ``task``: for the message."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in known:
            raise Refused(f"{task} takes no argument {flag}; its constructor has: {', '.join(known) or 'none'}")
        if not equals:
            value = "true" if not rest or rest[0].startswith("--") else rest.pop(0)
        found[name] = load_spec_text(value, "task.args")
    return found


def is_generated(path: Path) -> bool:
    """Return True if ``path`` ends in ``.yaml`` and the file's beginning contains the words of the header of ``render``. Raise
    ``OSError`` if a ``.yaml`` file cannot be read."""
    if path.suffix != ".yaml":
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return _MADE in file.read(4000).replace("\n# ", " ")


def render(
    spec: Mapping[str, Any], notes: Sequence[Note], facts: Facts, place: Place, way: Way, *,
    command: Command, typed: str, base: Path, file: str, python: Path | None,
) -> str:  # fmt: skip
    """Return the YAML text of the spec, with comments. ``typed``: the user's command; ``base``: the directory to which
    ``code.path`` is relative; ``file``: the name in the header comment. Raise ``SpecError`` if the spec would be invalid."""
    code = {"path": _relative(place.code, base), **spec.get("code", {})}
    lines = [
        *_comment(f"{typed}, as a job of Ratchet: {_MADE}. Every key: docs/spec.md. Check it: "
                  f"ratchet submit {file} --dry-run"),
        "#", *(line for note in notes for line in _comment(note.text, "! " if note.serious else "- ")),
        *(line for option, why in command.dropped.items() for line in _comment(f"{option} is not needed: {why}", "- ")),
        f"name: {flow_style(spec['name'])}",
        _line("code", code, "copied at submission; ranks start in a writable copy"),
        _line("script", spec["script"], "below code.path") if "script" in spec else _line("task", spec["task"], None),
        _python(python), _environment(spec),
        _line("world", spec["world"], _world(command, spec["world"])), *_hook(spec, facts, way), *_checkpoint(spec, way),
        _policy(spec, command),
    ]  # fmt: skip
    known = ("name", "code", "script" if "script" in spec else "task", "env", "world", "hook", "checkpoint", "policy")
    lines += [_line(key, value, None) for key, value in spec.items() if key not in known]
    text = "\n".join(lines) + "\n"
    data = load_spec_text(text)
    written = {key: value for key, value in data.items() if key not in ("code", "python")}
    assert written == {key: value for key, value in spec.items() if key != "code"}, "the file would say something else"
    data["code"]["path"] = str(place.code)
    parse_spec(data)
    return text


def _relative(path: Path, base: Path) -> str:
    """Return ``path`` relative to ``base``, beginning with ``.``."""
    text = os.path.relpath(path, base)
    return text if text.startswith(".") else f"./{text}"


def _line(key: str, value: Any, comment: str | None, *, off: bool = False) -> str:
    """Return the YAML line of one key, with its comment at its end or above. ``off``: the key is commented out."""
    text = ("# " if off else "") + f"{key}: {flow_style(value)}"
    if comment is None:
        return text
    whole = f"{text}  # {comment}"
    return whole if len(whole) <= _WIDTH else "\n".join([*_comment(comment), text])


def flow_style(value: Any) -> str:
    """Return ``value`` as YAML in flow style on one line. Strings other than plain words and paths are quoted."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow_style(k)}: {flow_style(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow_style(item) for item in value) + "]"
    plain = isinstance(value, str) and re.fullmatch(r"\.{0,2}[A-Za-z_/][\w/.-]*|\.{1,2}", value)
    if plain and load_spec_text(value) == value:
        return str(value)
    style = '"' if isinstance(value, str) else None
    return str(yaml.safe_dump(value, default_style=style, width=math.inf)).splitlines()[0]


def _comment(text: str, mark: str = "") -> list[str]:
    """Return ``text`` as wrapped comment lines. ``mark``: a bullet before the first line."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"# {mark}", subsequent_indent="# " + " " * len(mark), break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


def _python(python: Path | None) -> str:
    """Return the line for the key ``python``, or a commented example if there is no interpreter to set."""
    if python is None:
        return "# python: /path/to/venv  # where the job needs another environment than `ratchet serve` runs in"
    return _line("python", str(python), "your environment; it needs ratchet-train[worker]")


def _environment(spec: Mapping[str, Any]) -> str:
    """Return the line for the key ``env``, or a commented example if the spec has none."""
    if "env" in spec:
        return _line("env", spec["env"], "variables of every rank")
    return '# env: {OMP_NUM_THREADS: "1"}  # variables set before your command; torchrun itself sets this one'


def _world(command: Command, world: Mapping[str, Any]) -> str:
    """Return the comment of the key ``world``, which states where the number of ranks comes from. If the command's device is
    ``auto``, the comment also explains ``auto``."""
    told = command.given or "one rank; for more: --nproc-per-node"
    said = told if world.get("ranks_per_node") == command.ranks else "--set"
    counted = ", counted on this machine" if said.endswith(("=auto", "=cpu", "=gpu")) else ""
    return (
        f"{said}{counted}. auto: CUDA if the service's machine has it" if command.device == "auto" else said + counted
    )


def _hook(spec: Mapping[str, Any], facts: Facts, way: Way) -> list[str]:
    """Return the line for the key ``hook``; without one in the spec, a commented example or nothing."""
    if "hook" in spec:
        return [_line("hook", spec["hook"], "as in torch, without _hook; all of them: ratchet hooks")]
    blocks = [block for hook in facts.hooks if (block := hook_block(hook))]
    if way == "unmanaged":
        why = "with a Session or a Task: set here instead of in the script, and kept across restarts"
        return [_line("hook", blocks[0], why, off=True)] if blocks else []
    return [_line("hook", _EXAMPLE, "compresses gradients; default: allreduce; all of them: ratchet hooks", off=True)]


def _checkpoint(spec: Mapping[str, Any], way: Way) -> list[str]:
    """Return the line for the key ``checkpoint``; without one in the spec, the commented defaults or nothing."""
    if "checkpoint" in spec:
        return [_line("checkpoint", spec["checkpoint"], None)]
    if way == "unmanaged":
        return []
    return [_line("checkpoint", {"every_steps": 100, "keep_last": 3}, "the defaults", off=True)]


def _policy(spec: Mapping[str, Any], command: Command) -> str:
    """Return the line for the key ``policy``; without one in the spec, the commented default."""
    if "policy" not in spec:
        return _line(
            "policy",
            {"max_failures": 3},
            "restarts after failures, the default; torchrun has --max-restarts=0",
            off=True,
        )
    origin = {"max_failures": "--max-restarts", "stop_grace": "--shutdown-timeout"}
    said = ", ".join(f"{key}: {option}" for key, option in origin.items() if key in command.policy)
    return _line("policy", spec["policy"], said or None)
