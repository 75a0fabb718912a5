"""Determines how many ranks Lightning, which starts its ranks itself, would start, if the command does not specify it."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Final

from ratchet_client.init.command_line import Command, count_gpus
from ratchet_client.init.script_facts import Facts, Framework, Option

_ALL: Final = ("auto", "-1")


def with_devices(command: Command, facts: Facts) -> Command:
    """Return ``command`` with the ranks and the device of the script's only Lightning Trainer, as far as the command leaves them
    open."""
    trainer = lightning(facts)
    if trainer is None:
        return command
    if trainer.cpu and command.device == "auto":
        command = replace(command, device="cpu")
    if command.given is not None:
        return command
    count = device_count(command, facts, trainer)
    if count is None:
        return command
    gpus = 0 if trainer.cpu else count_gpus()
    shown = f"devices={trainer.devices}" if trainer.devices is not None else "devices"
    return replace(
        command,
        ranks=count,
        device="cuda" if gpus else command.device,
        given=f"{shown} of {trainer.name} ({trainer.place})",
    )


def lightning(facts: Facts) -> Framework | None:
    """Return the script's only Lightning Trainer; None if there is none, or several."""
    found = [one for one in facts.frameworks if one.name == "Lightning's Trainer"]
    return found[0] if len(found) == 1 else None


def device_count(command: Command, facts: Facts, trainer: Framework) -> int | None:
    """Return the number of devices that ``trainer`` would use on this machine; None if unknown."""
    value = _value(command, facts, trainer.devices)
    if value is None:
        return None
    if value in _ALL:
        return (0 if trainer.cpu else count_gpus()) or (1 if value == "auto" else None)
    try:
        given = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return None
    if isinstance(given, list | tuple):
        return len(given) or None
    return given if isinstance(given, int) and given > 0 else None


def _value(command: Command, facts: Facts, text: str | None) -> str | None:
    """Return, as text, the value of the Trainer's argument ``devices``; None if it is unknown. If the argument is an attribute
    with the name of a script's option, the option's value is returned. ``text``: the argument's source; None if the argument is
    missing, which means "auto"."""
    if text is None:
        return "auto"
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.Attribute):
        return text
    options = [option for option in facts.options if option.flags[0].startswith("-") and option.name == node.attr]
    if len(options) != 1:
        return None
    found, words = options[0].default, command.arguments
    for word, following in zip(words, [*words[1:], None], strict=False):
        flag, equals, value = word.partition("=")
        if _named(flag, facts) == options:
            found = value if equals else following  # argparse takes the last one
    return found


def _named(flag: str, facts: Facts) -> list[Option]:
    """Return the script's options that ``flag`` names. As in argparse, an incomplete long flag names each option that begins with
    it."""
    exact = [option for option in facts.options if flag in option.flags]
    if exact or len(flag) < 3 or not flag.startswith("--"):
        return exact
    return [option for option in facts.options if any(name.startswith(flag) for name in option.flags)]
