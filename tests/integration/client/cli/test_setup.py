"""Setting the command line up: a server and a token of one's own, completion; against a real service without a reconciler."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support.cli import Cli
from tests.support.server import Server


def test_config_stores_the_server_and_masks_the_token(cli: Cli, idle_server: Server) -> None:
    """As someone does who uses a service on another machine; here its address is this one's."""
    file = Path(cli("config", "path").text.strip())
    assert file.parent == cli.cwd and not file.exists()
    assert idle_server.url in cli("config").text and "not set" in cli("config").text
    said = cli("--home", "none", "config", "set", "token", stdin="x\n", expect=2).errors
    refused = " ".join(said.replace("│", " ").split())  # wrapped in a box
    assert "--home names the run directory" in refused and "leave --home out" in refused
    told = cli("config", "set", "token", stdin="x\n").errors
    assert f"the token is for {idle_server.url}; `ratchet serve --port" in told and "sent only to" in told
    assert cli("config", "--json").data["token"]["value"] == "********"
    cli("config", "unset", "token")
    assert "except where RATCHET_HOME is set" in cli("config", "set", "server", idle_server.url + "/").errors
    token = cli("token", "create", "--name", "mine", "--json").data["token"]
    cli("config", "set", "token", stdin=f"{token}\n")
    assert "an argument" in cli("config", "set", "token", "secret", expect=2).errors
    del cli.environment["RATCHET_HOME"]
    shown = cli("config", "--json").data
    assert shown["server"] == {"value": idle_server.url, "source": str(file)}
    assert shown["token"] == {"value": f"********{token[-4:]}", "source": str(file)}
    assert cli("list", "--json").data == [], "the server of the file is used"
    assert "belongs to" in cli("--server", "http://127.0.0.1:9", "config").text
    cli("config", "set", "token", stdin="a-rather-secret-word\n")
    assert "does not know this token" in cli("list", expect=5).errors
    file.chmod(0o644)
    assert "chmod 600" in cli("list", expect=5).errors
    file.chmod(0o600)
    cli("config", "unset", "token")
    assert json.loads(file.read_text()) == {"server": idle_server.url}
    cli("config", "unset", "server")
    assert "ratchet serve" in cli("list", expect=6).errors


def test_config_set_token_with_a_home_stores_it_for_that_service_and_not_for_the_server_that_is_set(
    cli: Cli, idle_server: Server
) -> None:
    cli("config", "set", "server", "https://ratchet.example.com")
    shown = cli("config", "set", "token", stdin="a-word-for-this-machine\n").errors
    assert f"sent only to {idle_server.url}" in shown
    assert "a-word" not in cli("config", "--json").text and cli("config", "--json").data["token"]["value"] is not None
    assert "belongs to" in cli("--server", "https://ratchet.example.com", "config").text
    for arguments in (["config", "unset", "token"], ["config", "unset", "server"]):
        cli(*arguments)


def test_config_set_token_prompts_without_echo(cli: Cli) -> None:
    cli("config", "set", "server", "http://127.0.0.1:9")
    del cli.environment["RATCHET_HOME"]
    with cli.terminal("config", "set", "token") as terminal:
        terminal.read_until("Token for http://127.0.0.1:9")
        terminal.write("a-rather-secret-word\n")
        assert terminal.end() == 0
    assert "secret" not in terminal.text and "secret" in (cli.cwd / "ratchet.json").read_text()


def test_bash_completes_commands_jobs_phases_and_hooks(cli: Cli) -> None:
    cli("submit", "spec.yaml", "--name", "complete-me")
    asked = [
        "ratchet ge",
        "ratchet get complete-",
        "ratchet get job-",
        "ratchet wait x --until RUN",
        "ratchet hooks pow",
    ]
    said = _bash(cli, asked)
    assert said[0].split() == ["get"] and said[1].split() == ["complete-me"]
    assert all(word.startswith("job-") for word in said[2].split()) and said[2]
    assert (said[3].split(), said[4].split()) == (["RUNNING"], ["powerSGD"])
    for shell in ("zsh", "fish"):  # neither is at hand: what their scripts ask for
        asking = {"_RATCHET_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "ratchet get complete-"}
        asking["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
        told = subprocess.run(cli.command(), env=cli.environment | asking, capture_output=True, text=True)
        assert "complete-me" in told.stdout and "QUEUED" in told.stdout
    cli.environment["RATCHET_HOME"] = str(cli.cwd / "nowhere")
    assert _bash(cli, ["ratchet get job-"]) == [""], "silent where no service runs"


def test_install_completion_installs_for_the_current_shell(cli: Cli) -> None:
    cli.environment["HOME"] = str(cli.cwd)
    typed = [f"{cli.command()[0]} --install-completion; true"]
    done = subprocess.run(
        ["bash", "--norc", "-c", *typed], env=cli.environment, cwd=cli.cwd, capture_output=True, text=True
    )
    assert "installed" in done.stdout, done
    (script,) = (cli.cwd / ".bash_completions").iterdir()
    assert str(script) in (cli.cwd / ".bashrc").read_text() and "complete" in script.read_text()


def _bash(cli: Cli, lines: list[str]) -> list[str]:
    """What bash offers for each unfinished line, with the script that ``--show-completion`` prints in it."""
    parts = [f'PATH="{Path(cli.command()[0]).parent}:$PATH"; eval "$(ratchet --show-completion)"']
    for line in lines:
        words = line.split()
        array = " ".join(f"'{word}'" for word in words)
        parts.append(f"COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; COMPREPLY=(); $(complete -p ratchet | "
                     "sed 's/.*-F \\([^ ]*\\) .*/\\1/') ratchet; echo \"${COMPREPLY[*]}\"")  # fmt: skip
    environment = {k: v for k, v in cli.environment.items() if k != "COLUMNS"}
    done = subprocess.run(
        ["bash", "--norc"],
        input="\n".join(parts),
        env=environment,
        cwd=cli.cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()
