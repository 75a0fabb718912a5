"""``ratchet serve``, ``reconcile`` and ``agent-host`` against ``python -m ratchet_service``, which they become."""

from __future__ import annotations

import argparse

import pytest
import typer.main

from ratchet_client.cli.app import app
from ratchet_client.cli.commands import serve
from ratchet_service import __main__ as service


def options_of_the_service(command: str) -> set[str]:
    (commands,) = [a for a in service._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return {flag for action in commands.choices[command]._actions for flag in action.option_strings} - {"-h"}


@pytest.mark.parametrize("command", ["serve", "reconcile", "agent-host"])
def test_cli_service_commands_have_same_options_as_service_module(command: str) -> None:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    assert {flag for parameter in found.params for flag in parameter.opts} | {"--help"} == options_of_the_service(
        command
    )


@pytest.mark.parametrize("command", ["serve", "reconcile"])
def test_bounds_and_the_log_level_reach_the_service(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    become: list[list[str]] = []
    monkeypatch.setattr(serve, "exec_module", lambda module, needs, extra, arguments, *rest: become.append(arguments))
    typer.main.get_command(app).main([command, "--bounds", "points=9", "--log-level", "debug"], standalone_mode=False)
    parsed = service._parser().parse_args(become[0])
    assert parsed.bounds.points == 9 and parsed.log_level == "debug"
