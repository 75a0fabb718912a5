"""``ratchet prove`` and ``ratchet compare`` on real jobs: what is exact is proved, what is wrong with a script is named.

``RATCHET_TEST_PROVE=all`` proves every example, those of Lightning, Accelerate and the Trainer among them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Cli
from tests.support.docs import ROOT
from tests.support.full_matrix import full
from tests.support.server import Server, processes_below

CODE = ROOT / "tests" / "support" / "prove_job"
WITHOUT_SESSION = {"0_torchrun", "1_hooks"}
EXAMPLES = sorted(p for p in (ROOT / "examples").rglob("*.yaml") if not {"cluster", *WITHOUT_SESSION} & {*p.parts})

pytestmark = pytest.mark.slow


@pytest.fixture
def spec(tmp_path: Path) -> str:
    data = {
        "name": "proved",
        "code": {"path": str(CODE)},
        "script": ["train.py"],
        "world": {"ranks_per_node": 2, "device": "cpu"},
        "resources": {"cpus_per_rank": 1},
        "hook": {
            "name": "powerSGD",
            "matrix_approximation_rank": 1,
            "start_powerSGD_iter": 3,
            "min_compression_rate": 1,
        },
    }
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(data))
    return str(path)


def parts(proof: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["status"] for one in proof["exercised"]}


def test_prove_of_exact_job_succeeds_and_leaves_no_job(server: Server, spec: str, tmp_path: Path) -> None:
    before = sorted(CODE.iterdir())
    proof = Cli(server.home, tmp_path)("prove", spec, "--json", deadline=240).data
    assert (proof["verdict"], proof["comparison"]["identical"], proof["what"]) == ("proved", True, "proved")
    assert proof["total"] == 200 and 14 < proof["steps"] < 40 and proof["comparison"]["step"] == proof["steps"]
    assert [text.split(" after")[0] for text in proof["interruptions"]] == [
        "rank 1 killed", "rank 0 killed in the evaluation", "the agent of rank 1 killed", "preempted",
    ]  # fmt: skip
    assert (
        proof["redone"] >= 6 and proof["times"] == ["time"] and proof["metrics"] == 3 and proof["metrics_differ"] == []
    )
    assert parts(proof) == {
        "interruptions": "exercised", "hook phase": "exercised", "end of an epoch": "exercised", "evaluation": "exercised",
        "scheduler": "exercised", "accumulation": "none seen",
    }  # fmt: skip
    assert server.call("GET", "/v1/jobs").json()["items"] == [] and sorted(CODE.iterdir()) == before


@full
def test_prove_names_a_generator_missing_in_the_checkpoint(server: Server, spec: str, tmp_path: Path) -> None:
    text = Cli(server.home, tmp_path)("prove", spec, "--set", "env.PLANT=generator", expect=1, deadline=240).text
    assert text.startswith("DIFFERS: the interrupted run of proved") and "NOT REPEATABLE" not in text
    assert re.search(r"first at step \d+, after which their parameters differ", text)
    assert "__main__:NOISE" in text and "metric loss at step" in text and "next: " in text


@full
def test_prove_fails_for_a_transient_difference_in_redone_steps(server: Server, spec: str, tmp_path: Path) -> None:
    given = ("--set", "env.PLANT=healing", "--set", "hook={name: allreduce}")
    proof = Cli(server.home, tmp_path)("prove", spec, *given, "--json", expect=1, deadline=240).data
    assert (proof["verdict"], proof["comparison"]["identical"], proof["metrics_differ"]) == ("differs", True, [])
    assert any("done again, differs from its first execution" in text for text in proof["reports"])


def test_prove_does_not_accept_equal_bits_after_inexact_resume(server: Server, spec: str, tmp_path: Path) -> None:
    given = ("--set", "env.PLANT=forgotten", "--set", "world.ranks_per_node=1", "--set", "hook={name: allreduce}")
    text = Cli(server.home, tmp_path)("prove", spec, *given, expect=3, deadline=240).text
    head, cause = text.splitlines()[:2]
    assert re.match(r"EQUAL, BUT NOT EXACT: proved, interrupted [34] times", head), head
    assert "ConstantLR: created by the script and not registered" in cause, cause


def test_prove_reports_non_repeatable_training_as_such(server: Server, spec: str, tmp_path: Path) -> None:
    python = tmp_path / "other-python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    given = ("--set", "env.PLANT=clock", "--set", f"python={python}")
    printed = Cli(server.home, tmp_path)("prove", spec, *given, expect=1, deadline=240)
    assert f"the jobs run with {python}: what is proved" in printed.errors
    text = printed.text
    assert text.startswith("NOT REPEATABLE: two undisturbed runs of proved differ")
    assert "The resume is not the cause" in text and "first at step 1, after" in text and "interrupt" not in text


@full
def test_prove_reports_compression_that_never_started(server: Server, spec: str, tmp_path: Path) -> None:
    cli = Cli(server.home, tmp_path)
    text = cli("prove", spec, "--set", "hook.start_powerSGD_iter=1000", "--steps", "60", expect=3, deadline=240).text
    assert text.startswith("EQUAL, BUT NOT ALL WAS EXERCISED") and "after 60 of 200 steps" in text
    (row,) = [line for line in text.splitlines() if line.startswith("hook phase")]
    assert "not exercised" in row and "compression starts at step 1000 (start_powerSGD_iter), the runs had 60" in row


def test_prove_without_service_refuses_script_without_session(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('hello')\n")
    path = tmp_path / "plain.yaml"
    path.write_text(json.dumps({"name": "plain", "code": {"path": "code"}, "script": ["train.py"]}))
    result = Cli(tmp_path / "home", tmp_path)("prove", "./plain.yaml", expect=5, deadline=120)
    assert "no service runs" in result.errors and "has no Session of Ratchet" in result.errors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["code", "plain.yaml"] and processes_below(tmp_path) == []


def test_compare_of_two_jobs_and_prove_of_an_existing_job(server: Server, spec: str, tmp_path: Path) -> None:
    cli = Cli(server.home, tmp_path)
    short = ("--set", "env.STEPS=12", "--set", "checkpoint.every_steps=5", "--set", "checkpoint.first=off")
    a, b = (cli("submit", spec, *short).text.strip() for _ in range(2))
    other = cli("submit", spec, *short, "--set", "seed=1").text.strip()
    for job in (a, b, other):
        server.wait_phase(job, "SUCCEEDED")
    assert cli("compare", a, b).text.startswith(f"identical: {a}/step-000000000012")
    text = cli("compare", a, other, expect=1).text
    assert text.startswith(f"not identical: {a}/step-000000000005") and "generator" in text and "next: " in text

    def stored() -> list[tuple[str, bool]]:
        return [(c["id"], c["pinned"]) for c in cli("checkpoints", "ls", a, "--json").data]

    before = stored()
    text = cli("prove", a, deadline=240).text
    assert text.startswith(f"PROVED: {a}, steps 11 to 12, done again, ends with the same bits")
    assert "not judged, since two runs from the same state differ in them: time" in text.splitlines()
    assert stored() == before and not any(pinned for _, pinned in before)
    assert {job["id"] for job in server.call("GET", "/v1/jobs").json()["items"]} == {a, b, other}
    one = cli("submit", spec, "--set", "env.STEPS=3", "--set", "checkpoint.first=off").text.strip()
    server.wait_phase(one, "SUCCEEDED")
    assert "two of different steps are needed" in cli("prove", one, expect=4).errors


def test_prove_of_an_existing_job_fails_for_a_metric_that_differs(server: Server, spec: str, tmp_path: Path) -> None:
    cli = Cli(server.home, tmp_path)
    short = ("--set", "env.STEPS=7", "--set", "checkpoint.every_steps=5", "--set", "checkpoint.first=off")
    job = cli("submit", spec, *short, "--set", "env.PLANT=counted").text.strip()
    server.wait_phase(job, "SUCCEEDED")
    proof = cli("prove", job, "--json", expect=1, deadline=240).data
    assert (proof["verdict"], proof["comparison"]["identical"], proof["times"]) == ("differs", True, ["time"])
    assert proof["metrics_differ"] == ["counted at step 6: 6 against 1"]


@pytest.mark.skipif(os.environ.get("RATCHET_TEST_PROVE") != "all", reason="RATCHET_TEST_PROVE=all proves the examples")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_job_is_proved_exact(server: Server, tmp_path: Path, example: Path) -> None:
    """Most within their default number of steps; what an example does not come to in these is told."""
    done = Cli(server.home, tmp_path).run_without_check(
        "prove", str(example), "--set", "world.device=cpu", "--json", deadline=1200
    )
    assert done.code in (0, 3), done
    proof = done.data
    assert proof["comparison"]["identical"] and proof["metrics_differ"] == [] and proof["redone"] >= 2
    assert (done.code == 0) == ("not exercised" not in parts(proof).values())
