"""The quick start's commands and the README's, as they stand there, typed one after the other by somebody with a new home.

``RATCHET_TEST_QUICK_START=slow`` (``make quick-start``): with 30 s between them, what pip installs installed, and none left out.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.docs import ROOT, Block, blocks
from tests.support.import_hooks import after_import
from tests.support.server import Server, wait_for
from tests.support.shell import Ended, Shell, commands

SLOW = os.environ.get("RATCHET_TEST_QUICK_START") == "slow"
PAUSE = 30.0
_LONG = {"ratchet prove"}
"""Only with SLOW: tests/e2e/test_prove.py has it."""
_VENV = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then cd "{root}" && exec "{python}" -m tests.support.virtual_environments "$3" service,worker; fi
exec "{python}" "$@"
"""
_UNHURRIED = after_import(
    "torch.optim.optimizer", "module.register_optimizer_step_post_hook(lambda *_: time.sleep(0.5))"
)
"""The training that commands are typed beside, and whose end nobody waits for, leaves them the cores."""


class Reader:
    """Somebody with an empty home directory, who types what a page says. ``terminals``: the first one has the service."""

    def __init__(self, home: Path) -> None:
        self.home = home
        tools = home / "tools"
        tools.mkdir(parents=True)
        _script(tools / "pip", f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@"\n')
        python = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n' if SLOW else _VENV
        _script(tools / "python3", python.format(root=ROOT, python=sys.executable))
        (home / "runtime").mkdir(mode=0o700)
        self.variables = {"HOME": str(home), "PATH": f"{tools}:/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "dumb"}
        self.variables["XDG_RUNTIME_DIR"] = str(home / "runtime")
        if SLOW:
            self.variables |= {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k.endswith("_proxy")}
        else:  # the packages are there; hatchling is this environment's
            self.variables |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": os.devnull}
            self.variables["RATCHET_STANDBY"] = os.environ["RATCHET_STANDBY"]
        self.shells: list[Shell] = []
        self.typed: set[str] = set()

    def terminal(self, directory: Path) -> Shell:
        directory.mkdir(exist_ok=True)
        shell = Shell(directory, self.variables, self.home / f"terminal-{len(self.shells) + 1}")
        self.shells.append(shell)
        return shell

    def install(self, block: Block) -> None:
        shell = self.terminal(ROOT)
        for command in commands(block.text):
            assert shell.run(command).code == 0, f"{command}: {shell.output()}"
        if not SLOW:
            (packages,) = self.home.glob("ratchet/lib/python3*/site-packages")
            (packages / "unhurried.py").write_text(_UNHURRIED)
            (packages / "unhurried.pth").write_text("import unhurried\n")

    def serve(self, block: Block, directory: Path) -> Server:
        """Type a block that ends with ``ratchet serve``."""
        shell = self.activated(directory)
        *others, serve = commands(block.text)
        for command in others:
            self._typed(shell, command)
        assert serve.split()[:2] == ["ratchet", "serve"]
        ended = shell.start(serve)
        server = Server(directory / ".ratchet")
        wait_for(lambda: ended() or server.paths.service_file.exists(), "the service to start")
        assert ended() is None, shell.output()
        return server

    def activated(self, directory: Path) -> Shell:
        shell = self.terminal(directory)
        assert shell.run(". ~/ratchet/bin/activate").code == 0
        return shell

    def read(self, shell: Shell, server: Server, lines: list[str]) -> dict[str, Ended]:
        """Type the lines; between them the reader looks on until the job trains or stands still. What each said."""
        said = {}
        for command in lines:
            if not SLOW and " ".join(command.split()[:2]) in _LONG:
                continue
            said[command.partition("#")[0].strip()] = self._typed(shell, command, server)
            time.sleep(PAUSE if SLOW else 0)
            wait_for(lambda: settled(server), f"the job to train or to stand still after {command}", 120)
        return said

    def _typed(self, shell: Shell, command: str, server: Server | None = None) -> Ended:
        words = command.partition("#")[0].split()
        self.typed.add(" ".join(words))
        if server is None or not {"--follow", "-f", "top"} & set(words):
            ended = shell.run(command)
            assert ended.code == 0, f"{command}: {ended}"
            return ended

        def enough(said: str) -> bool:
            if "--follow" in words:
                return "RUNNING" in said and settled(server)
            return shell.has_socket() and ("RUNNING" in said or "top" not in words)

        ended = shell.run(command, enough)
        assert ended.code == 130 and "Traceback" not in ended.text, f"{command}: {ended}"
        return ended

    def close(self) -> None:
        for shell in reversed(self.shells):
            shell.close()


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def jobs(server: Server) -> list[dict[str, object]]:
    return list(server.call("GET", "/v1/jobs").json()["items"])


def settled(server: Server) -> bool:
    """Whether every job trains, its first step of this attempt done, or neither trains nor is about to. Of a script without a
    Session no step is seen: it trains once it runs. (Its end is not waited for: torch may hang behind its last line.)"""
    for job in jobs(server):
        if job["phase"] in ("QUEUED", "STARTING", "STOPPING"):
            return False
        if job["phase"] == "RUNNING" and not server.job(str(job["id"]))["progress"]["steps_per_second"]:
            report = server.attempts(str(job["id"]))[-1]["resume_report"]
            if report is None or report["verdict"] != "unmanaged":
                return False
    return True


def page(name: str, heading: str) -> list[Block]:
    """The blocks of shell lines below a heading of the second level."""
    path = ROOT / name
    text = path.read_text()
    first = text[: text.index(f"\n## {heading}\n")].count("\n") + 2
    last = first + text[text.index(f"\n## {heading}\n") + 1 :].partition("\n## ")[0].count("\n")
    return [block for block in blocks(path) if block.language == "" and first <= block.line <= last]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Ratchet is installed as the quick start says."""
    reader = Reader(tmp_path_factory.mktemp("home"))
    (block,) = page("docs/quick-start.md", "Install")
    reader.install(block)
    yield reader
    reader.close()


def test_quick_start_commands_work_in_an_empty_directory(reader: Reader) -> None:
    directory = reader.home / "digits"
    start, submit, look = page("docs/quick-start.md", "Run a job")
    server = reader.serve(start, directory)
    try:
        shell = reader.activated(reader.home / "elsewhere")
        said = reader.read(shell, server, commands(submit.text) + commands(look.text))
        (job,) = jobs(server)
        assert job["phase"] == "CANCELLED"
        causes = [attempt["cause"] for attempt in server.attempts(str(job["id"]))]
        assert causes == ["api-preempt", "api-suspend", "api-cancel"], said
        assert "exact" in said["ratchet attempts digits"].text and "RUNNING" in said["ratchet top"].text

        (own,) = page("docs/quick-start.md", "Your own code")
        shutil.copy(ROOT / "examples" / "adoption" / "0_torchrun" / "train.py", reader.home / "elsewhere")
        reader.read(shell, server, commands(own.text))
        assert {"train", "digits"} == {job["name"] for job in jobs(server)}
    finally:
        server.stop()


def test_readme_commands_work_in_a_clone(reader: Reader) -> None:
    clone = reader.home / "clone"
    clone.mkdir()
    (clone / "examples").symlink_to(ROOT / "examples")
    (block,) = page("README.md", "A job")
    lines = commands(block.text)
    lines = [line for line in lines if SLOW or line.partition("#")[0].strip() not in reader.typed]
    first = next(place for place, line in enumerate(lines) if line.startswith("ratchet submit"))
    server = reader.serve(Block("", "\n".join(lines[:first]), 0, False), clone)
    try:
        reader.read(reader.activated(clone), server, lines[first:])
        assert jobs(server)
    finally:
        server.stop()


def test_digits_example_is_equal_on_every_page_and_trains_for_minutes() -> None:
    """At 300 steps per second, more than any machine does that it was seen on, five minutes are 90,000 steps."""
    example = yaml.safe_load((ROOT / "examples" / "digits-powersgd.yaml").read_text())
    labels = example.pop("labels")
    (shown,) = (b.text for b in blocks(ROOT / "README.md") if b.text.startswith("# examples/digits-powersgd.yaml"))
    typed = page("docs/quick-start.md", "Run a job")[1].text.split("<<'END'\n")[1].split("\nEND\n")[0]
    assert labels == {"example": "digits"} and yaml.safe_load(shown) == example == yaml.safe_load(typed)
    images = 1437  # of which each of two ranks takes 32 a step
    assert example["task"]["args"]["epochs"] * (images // (2 * 32)) >= 90_000
