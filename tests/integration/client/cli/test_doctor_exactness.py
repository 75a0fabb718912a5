"""``ratchet doctor --exactness`` for real: jobs killed and resumed on this machine; a hook that loses its state is found out.

``RATCHET_TEST_HOOKS=all`` takes every available hook instead of the one with the most to lose.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet_client.cli.doctor.exactness import Proof, _run
from ratchet_client.cli.doctor.progress import Progress
from ratchet_client.cli.doctor.throwaway import temporary_service
from tests.support.docs import ROOT
from tests.support.doctor import FORGETS_RESIDUALS, Doctor, by_name, file_digests
from tests.support.fork_server import Interpreter
from tests.support.full_matrix import full
from tests.support.server import Server, processes_below, wait_for

HOOKS = ("allreduce", "fp16_compress", "powerSGD") if os.environ.get("RATCHET_TEST_HOOKS") == "all" else ("powerSGD",)
CHOSEN = [word for hook in HOOKS for word in ("--hook", hook)]

FORKS_AGENTS = """
if "ratchet_service" in sys.orig_argv:
    from tests.support.fork_server import fork_agents
    fork_agents(os.environ["TEST_RANKS"])
"""


@full
@pytest.mark.slow
def test_doctor_exactness_passes_for_correct_hooks_and_leaves_nothing(tmp_path: Path) -> None:
    """In a pipe, for a run directory that is not there: it is not made, and nothing else is left either."""
    place = tmp_path / "place"
    done = Doctor(place / "home", place)("--exactness", *CHOSEN, deadline=280)
    checks, _, proofs = done.text.partition("\nHOOK ")
    header, *rows = checks.splitlines()
    assert header.split() == ["CHECK", "STATUS", "FOUND"] and "\x1b" not in done.text
    assert "failed" not in checks and "bit-equal" in next(row for row in rows if row.startswith("gloo"))
    for hook in HOOKS:
        words = next(line for line in proofs.splitlines() if line.startswith(hook)).split()
        assert "yes" in words and int(words[-4]) >= 50 and 0 <= int(words[-2]) <= 20
    assert "ranks killed" in done.errors and "jobs done" in done.errors
    assert list(place.iterdir()) == [] and processes_below(place) == []


@pytest.mark.slow
def test_doctor_exactness_detects_a_hook_that_loses_its_residuals(
    idle_server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """As JSON, beside a service that runs: of its directory only SQLite's own shared memory may change. Ranks are forked."""
    (tmp_path / "sitecustomize.py").write_text(FORGETS_RESIDUALS + FORKS_AGENTS)
    before = file_digests(idle_server.home)
    doctor = Doctor(idle_server.home, tmp_path)
    doctor.environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", doctor.environment["PYTHONPATH"])
        ranks = Interpreter("ranks", own=True)
        doctor.environment["TEST_RANKS"] = ranks.address
    request.addfinalizer(lambda: ranks.close())
    rows = by_name(doctor("--exactness", "--hook", "powerSGD", "--json", expect=1, deadline=280))
    found = rows.pop("exactness powerSGD cpu")
    assert (found["status"], found["value"]) == ("failed", "not identical")
    assert "hook state" in found["detail"] and "98 tensors" in found["detail"]
    assert [row for row in rows.values() if row["status"] == "failed"] == []
    assert rows["service"]["value"] == "running" and rows["service version"]["detail"] == "protocol 1"
    assert rows["schema"]["status"] == rows["database"]["status"] == "ok"
    after = file_digests(idle_server.home)
    assert {k: v for k, v in after.items() if not k.endswith("-shm")} == {
        k: v for k, v in before.items() if not k.endswith("-shm")
    }
    assert [p for p in idle_server.home.parent.iterdir() if p != idle_server.home] == []


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], pytest.param(["allreduce"], marks=full)], ids=["alone", "with-allreduce"])
def test_hook_whose_job_is_refused_says_why_and_other_hooks_are_proved(tmp_path: Path, others: list[str]) -> None:
    """``custom`` without a function of the user's is refused by the service; the command line does not offer it."""
    refused, *proved = (Proof(hook, "cpu", "here", 2) for hook in ("custom", *others))
    with temporary_service(tmp_path / "home") as (client, paths), Progress() as progress:
        _run(client, paths, [refused, *proved], None, progress)
    assert all(one.identical and one.problems == [] and one.tensors >= 50 for one in proved)
    assert refused.identical is None and refused.problems == ["its job was refused: /hook/hook: this key is required"]


WAITS = """
import sys, time
from pathlib import Path
from ratchet_client.cli.doctor.exactness import Proof, spec_of
from ratchet_client.cli.doctor.progress import Progress
from ratchet_client.cli.doctor.throwaway import temporary_service

with temporary_service(Path(sys.argv[1])) as (client, paths):
    client.submit(spec_of(Proof("allreduce", "cpu", "here", 2), None))
    print(paths.home, flush=True)
    time.sleep(600)
"""


def test_an_interrupted_proof_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(tmp_path / "home")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        root = Path(process.stdout.readline().strip())
        assert root.parent == tmp_path
        wait_for(lambda: list(root.glob("jobs/*/attempts/0001/agent.json")), "an agent to run")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert "KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == [] and processes_below(root) == []
