"""Command lines of Ratchet that a text names: found, and taken apart by the real command line without running anything."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import typer

from ratchet_client.cli.app import app

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("client", "service", "worker", "contract", "store", "hooks")
PLACEHOLDER: Final = re.compile(r"\b[A-Z]{2,}\b|\bN\b")
"""Words in capitals stand for a value of the reader's; any number will do for one."""
_QUOTED: Final = re.compile(r"(?<!`)`(ratchet(?: [^`]*)?)`(?!`)")


def string_literals(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string in a module, docstrings left out; ``1`` for each value that an f-string has."""
    tree = ast.parse(path.read_text())
    apart = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    apart |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(v.value) if isinstance(v, ast.Constant) else "1" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield node.lineno, node.value


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).glob("ratchet*/**/*.py"))


def commands(text: str) -> list[str]:
    """What a sentence tells to type: between backquotes, or behind a colon up to the end of the clause."""
    bare = re.findall(rf"(?<![`/\w])ratchet (?:{'|'.join(_names())})\b(?!:)[^`;,)\"\n]*", _QUOTED.sub("", text))
    return [*_QUOTED.findall(text), *(command.partition(" (")[0] for command in bare)]


@cache
def command_tree() -> Any:
    """The whole command line, its options disarmed."""
    command = typer.main.get_command(app)
    _disarm(command)
    return command


@cache
def _names() -> tuple[str, ...]:
    return tuple(command_tree().commands)


@cache
def options() -> frozenset[str]:
    """Of all commands."""
    return frozenset(_options(command_tree()))


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from _options(inner)


def parse(text: str) -> None:
    """Let the real command line take the arguments apart. Raises ``AssertionError``."""
    command, name, outer = command_tree(), "ratchet", None
    rest = shlex.split(PLACEHOLDER.sub("1", text))[1:]
    if _is_command(rest):
        return  # by its name alone, in a sentence
    try:
        while True:
            outer = command.make_context(name, list(rest), parent=outer)
            rest = [*getattr(outer, "_protected_args", []), *outer.args]
            if not rest or not hasattr(command, "resolve_command"):
                break
            name, command, rest = command.resolve_command(outer, rest)
    except typer.Exit:
        pass  # --help, --version
    except SystemExit as error:
        raise AssertionError(f"`{text}` ends with {error}") from None
    except Exception as error:
        said = str(getattr(error, "message", error))
        assert "does not exist" in said, f"`{text}`: {type(error).__name__}: {said}"  # a file that is only named


def _is_command(words: list[str]) -> bool:
    """Do these words name a command, or a group of them?"""
    command = command_tree()
    for word in words:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            return False
    return True


def _disarm(command: Any) -> None:
    """Options that act while they are parsed (install completion, look a job up in the service) must not; ``--help`` may."""
    for parameter in command.params:
        if "--help" not in parameter.opts:
            parameter.callback = None
    for inner in getattr(command, "commands", {}).values():
        _disarm(inner)
