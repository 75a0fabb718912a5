"""What the documentation shows is what happens: its Python runs, its commands parse, its specs are valid, its notebook trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.parse import parse_spec
from tests.support.command_lines import parse
from tests.support.docs import PAGES, ROOT, Block, blocks, prose
from tests.support.full_matrix import full
from tests.support.server import Server

TINY = {
    "name": "tiny",
    "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask", "args": {"epochs": 2}},
    "world": {"ranks_per_node": 1, "device": "cpu"},
    "resources": {"cpus_per_rank": 1},
    "hook": {"name": "powerSGD", "start_powerSGD_iter": 10},
    "checkpoint": {"every_steps": 20},
}
GROUP_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
_COMMAND = re.compile(r"(?:^|[\s(])(ratchet(?: [^|;&)#\n]*)?)")


def _id(value: Any) -> str:
    return value.name if isinstance(value, Path) else ""


def _fresh(server: Server, directory: Path, *command: str, stdin: str = "", **variables: str) -> str:
    """A process that finds the service by ``RATCHET_HOME``, in a directory where ``examples/`` is."""
    (directory / "examples").symlink_to(ROOT / "examples")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RATCHET_")}
    environment |= {"RATCHET_HOME": str(server.home), "RATCHET_CONFIG": str(directory / "none.json")}
    environment |= {"PYTHONPATH": str(ROOT), **GROUP_OF_ONE, **variables}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=environment,
        input=stdin,
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def test_docs_python_blocks_all_run(server: Server, tmp_path: Path) -> None:
    job_id = server.submit(TINY)
    server.wait_phase(job_id, "SUCCEEDED")
    pages = {
        page.name: [(b.line, b.text) for b in blocks(page) if b.language == "python" and not b.not_run]
        for page in PAGES
    }
    assert sum(map(len, pages.values())) >= 8
    told = _fresh(server, tmp_path, "-m", "tests.support.docs", stdin=json.dumps([pages, job_id]))
    assert int(re.findall(r"(\d+) examples in docstrings", told)[0]) >= 20


_CURL = """
set -euo pipefail
curl() { printf '%s\\0' "$@" >> calls; echo >> calls; command curl --fail-with-body -sS "$@"; }
"""
OF_AGENTS = {
    "POST /v1/jobs/{job_id}/attempts/{number}/reports",
    "GET /v1/jobs/{job_id}/attempts/{number}/control",
    "GET /v1/jobs/{job_id}/attempts/{number}/code/{digest}",
}


def test_docs_api_page_runs_with_curl_and_covers_every_endpoint(server: Server, tmp_path: Path) -> None:
    lines = "".join(block.text for block in blocks(ROOT / "docs" / "api.md") if block.language == "sh")
    python = Path(sys.executable).parent
    environment = {"PATH": f"{python}{os.pathsep}{os.environ['PATH']}", "URL": server.url, "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", _CURL + lines], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "SUCCEEDED" in done.stdout and (tmp_path / "runs" / "log.txt").read_text() == "loss 0.1\n"
    assert (tmp_path / "model.safetensors").stat().st_size > 1000

    made = {_called(line, server.url) for line in (tmp_path / "calls").read_text().splitlines()}
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    shown = set()
    for method, path in made:
        fitting = [known for known in paths if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", known), path)]
        shown.add(f"{method} {min(fitting, key=lambda known: known.count('{'))}")
    assert shown == {f"{method.upper()} {path}" for path, item in paths.items() for method in item} - OF_AGENTS


@pytest.mark.parametrize(("phase", "code"), [("SUCCEEDED", 0), ("FAILED", 1)])
def test_docs_curl_wait_loop_ends_when_the_job_ends_in_another_phase(phase: str, code: int) -> None:
    lines = next(b.text for b in blocks(ROOT / "docs" / "api.md") if "reaches()" in b.text)
    shell = f"auth= URL=\n{lines}\ncurl() {{ :; }}\nfield() {{ echo {phase}; }}\nreaches job-1 SUCCEEDED"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "job-1 is FAILED, not SUCCEEDED\n" if code else "")


def _called(line: str, url: str) -> tuple[str, str]:
    """Method and path of one call of curl, whose arguments end with NUL each."""
    arguments = line.split("\0")
    data = any(a in ("-d", "--data-binary") for a in arguments)
    method = (
        arguments[arguments.index("-X") + 1]
        if "-X" in arguments
        else "POST"
        if data
        else "PUT"
        if "-T" in arguments
        else "GET"
    )
    [path] = [a.removeprefix(url).partition("?")[0] for a in arguments if a.startswith(url)]
    return method, path


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_docs_yaml_specs_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.language in ("yaml", "yml") and not block.not_run:
            data = yaml.safe_load(block.text)
            if isinstance(data, dict) and set(data) <= set(JobSpec.model_fields):
                whole = {"name": "part", **({} if {"task", "script"} & set(data) else {"task": TINY["task"]}), **data}
                parse_spec(whole)


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_docs_ratchet_commands_parse(page: Path) -> None:
    shown = [command for block in blocks(page) if block.language in ("", "sh", "bash") for command in _commands(block)]
    inline = re.findall(r"(?<!`)`(ratchet [^`]*)`(?!`)", prose(page))
    for command in [*shown, *(c for c in inline if not re.search(r"[\[|<\n]|\.\.\.|\bCOMMAND\b", c))]:
        parse(command)


def _commands(block: Block) -> list[str]:
    """Every ``ratchet ...`` of a block of shell lines, those within ``$(...)`` and behind ``&&`` too."""
    lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
    return [command for line in lines for command in _COMMAND.findall(line) if " " in command.strip()]


_RUN_CELLS = """
import json, os, pathlib, sys
scope = {"__name__": "__main__"}
for cell in json.loads(pathlib.Path("examples/notebook.ipynb").read_text())["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), scope)
curves = [[len(line.get_xdata()) for line in axes.lines] for axes in (scope["left"], scope["right"])]
report = scope["report"]
print(json.dumps({"curves": curves, "verdict": report.verdict, "parts": len(report.components), "accuracy": scope["accuracy"],
                  "phase": scope["now"].job.phase, "attempts": scope["now"].job.attempt}))
"""


@full
def test_the_notebook_trains_preempts_and_plots(server: Server, tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4 and all(cell["id"] for cell in notebook["cells"])
    assert all(cell.get("outputs", []) == [] for cell in notebook["cells"]), "stored without outputs"
    told = _fresh(server, tmp_path, "-c", _RUN_CELLS, MPLBACKEND="Agg")
    seen = json.loads(told.splitlines()[-1])
    assert (seen["phase"], seen["attempts"], seen["verdict"]) == ("SUCCEEDED", 2, "exact")
    (loss, test_loss), (warm_up, compressing) = seen["curves"]
    assert loss > 10 and test_loss == 30 and warm_up > 0 and compressing > 1 and seen["parts"] >= 10
    assert 0.9 < seen["accuracy"] <= 1.0
    assert "<svg" in (tmp_path / "digits.svg").read_text() and (tmp_path / "digits.log").exists()
