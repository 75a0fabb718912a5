"""``ratchet serve``, ``reconcile`` and ``agent-host`` against ``python -m ratchet_service``, which they become."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer.main
from typer.testing import CliRunner

from ratchet_client.cli.app import app
from ratchet_contract import env_vars
from ratchet_contract.service_options import COMMANDS, Option
from ratchet_service import __main__ as service
from ratchet_service.commands import serve
from ratchet_service.config.network import Listening
from ratchet_service.config.settings import Settings
from ratchet_service.config.standby_bounds import StandbyBounds
from ratchet_service.observability.logging import LogFormat
from ratchet_service.scheduling.preemption import Scope
from ratchet_service.scheduling.scheduler import Preemption

each_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RATCHET_"):
            monkeypatch.delenv(name)


def service_parser(command: str) -> argparse.ArgumentParser:
    (commands,) = [a for a in service._parser()._actions if isinstance(a, argparse._SubParsersAction)]
    found: argparse.ArgumentParser = commands.choices[command]
    return found


def parsed(*arguments: str) -> dict[str, Any]:
    return vars(service._parser().parse_args(arguments))


def sample(option: Option) -> str:
    """A valid value that is no default."""
    texts = {"--bounds": "points=9", "--run-as-limits": "processes=99", "--database-url": "sqlite:////x.db"}
    texts |= {"--webhook-network": "10.0.0.0/8", "--standby": "processes=7"}
    return texts.get(option.flag) or (option.choices[-1] if option.choices else "/x" if option.kind is Path else "7")


def given(option: Option) -> list[str]:
    return [option.flag] if option.kind is bool else [option.flag, sample(option)]


@each_command
def test_both_programs_have_the_same_options_and_help_texts(command: str) -> None:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    ours = {parameter.opts[0]: parameter.help for parameter in found.params if "--help" not in parameter.opts}
    theirs = {a.option_strings[0]: a.help for a in service_parser(command)._actions if "--help" not in a.option_strings}
    assert ours == theirs and len(ours) >= 4
    assert " ".join(found.help.split()) in " ".join(service_parser(command).format_help().split())


@each_command
def test_every_option_of_ratchet_reaches_the_service(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _path, argv, environ: became.append((argv, environ)))
    options = COMMANDS[command].options
    arguments = [text for option in options for text in given(option)]
    assert CliRunner().invoke(app, [command, *arguments]).exit_code == 0
    [(argv, environ)] = became
    default, expected = parsed(command), parsed(command, *arguments)
    assert [option.name for option in options if default[option.name] == expected[option.name]] == []
    assert "--database-url" not in argv, "every user of the machine can read it, and it may hold a password"
    monkeypatch.setenv(env_vars.DATABASE_URL, environ.get(env_vars.DATABASE_URL, ""))
    assert parsed(*argv[argv.index("ratchet_service") + 1 :]) == expected


@each_command
def test_only_the_documented_variables_replace_defaults(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets RATCHET_PORT=tcp://... in a cluster that has a service of the name ``ratchet``."""
    default = parsed(command)
    for option in COMMANDS[command].options:
        expected = default if option.variable is None else parsed(command, *given(option))
        variable = option.variable or f"RATCHET_{option.name.upper()}"
        with monkeypatch.context() as patched:
            patched.setenv(variable, "tcp://10.0.0.1:8000" if option.variable is None else sample(option))
            assert parsed(command) == expected, variable
            patched.setenv(variable, "")
            assert parsed(command) == default, variable


def test_repeated_options_add_to_the_values_of_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_CODE_ROOTS", "/a b::/c")
    monkeypatch.setenv("RATCHET_CHECKPOINT_URI_ROOTS", " s3://a\ts3://b:1\n")
    found = parsed("serve", "--code-root", "/d:e", "--checkpoint-uri-root", "s3://c d")
    assert found["code_root"] == [Path("/a b"), Path("/c"), Path("/d:e")]
    assert found["checkpoint_uri_root"] == ["s3://a", "s3://b:1", "s3://c d"]


def test_defaults_of_options_are_the_defaults_of_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(env_vars.STANDBY, raising=False)  # off in tests
    called: list[tuple[Any, ...]] = []
    for name in ("serve", "reconcile"):
        monkeypatch.setattr(serve, name, lambda *arguments: called.append(arguments))
        assert service.main([name, "--home", str(tmp_path)]) == 0
    settings = Settings(tmp_path)
    assert called == [(serve.ServeOptions(settings),), (settings, None, Preemption(), None)]


def test_choices_of_options_are_those_of_the_settings() -> None:
    options = {option.name: option for option in COMMANDS["serve"].options}
    assert options["preemption"].choices == get_args(Scope)
    assert options["log_format"].choices == get_args(LogFormat)
    assert options["auth"].choices == get_args(get_type_hints(Listening)["auth"])


@pytest.mark.parametrize(
    ("command", "option", "value", "words"),
    [
        ("serve", "--port", "65536", "must be a whole number from 0 to 65535, not '65536'"),
        ("serve", "--port", "http", "must be a whole number from 0 to 65535, not 'http'"),
        ("reconcile", "--metrics-port", "-1", "must be a whole number from 0 to 65535, not '-1'"),
        ("agent-host", "--cpu-slots", "0", "must be a whole number of at least 1, not '0'"),
        ("serve", "--drain", "inf", "must be a number from 0 to 1000000000, not 'inf'"),
        ("serve", "--preemption-min-run", "nan", "must be a number from 0 to 1000000000, not 'nan'"),
        ("serve", "--request-rate", "0", "must be a number from 0.01 to 1000000, not '0'"),
        ("reconcile", "--preemption", "all", "must be owner or any or off, not 'all'"),
        ("serve", "--log-level", "DEBUG", "must be debug or info or warning or error, not 'DEBUG'"),
    ],
)
def test_both_programs_refuse_a_wrong_value_with_the_same_words(
    command: str,
    option: str,
    value: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        service.main([command, option, value])
    assert ended.value.code == 2 and f"argument {option}: {words}" in capsys.readouterr().err
    refused = CliRunner().invoke(app, [command, option, value])
    assert refused.exit_code == 2 and f"Invalid value for '{option}': {words}" in refused.output


def test_bounds_of_parked_agents_have_units() -> None:
    found = parsed("serve", "--standby", "seconds=5m,memory=2Gi")["standby"]
    assert found == StandbyBounds(seconds=300.0, memory=2 << 30)


@pytest.mark.parametrize("wrong", ["processes=0", "seconds=5min", "seconds=0", "memory=512MB", "agents=2", "2"])
def test_wrong_bound_of_parked_agents_is_named_with_the_right_forms(
    wrong: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.STANDBY, f"{wrong},memory=1Gi" if "memory" not in wrong else wrong)
    with pytest.raises(SystemExit):
        service.main(["serve"])
    said = capsys.readouterr().err
    assert f"because of '{wrong.partition('=')[0]}'" in said and "seconds=DURATION (like 900 or 15m)" in said
    assert "(--standby, RATCHET_STANDBY)" in said
