"""``ratchet serve --run-as``, for real: what users' code finds it may do, and that everything else goes on as ever."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_client import RatchetClient
from ratchet_contract.processes import procfs
from ratchet_store.read.compare import compare, render
from tests.e2e.exactness import final_checkpoint
from tests.support.full_matrix import full
from tests.support.launch import wait_freeze
from tests.support.local_packages import make_sdist, make_wheel
from tests.support.run_as import AS_ROOT, UID, command_prefix, open_directory
from tests.support.server import Server, rank_pid, wait_for
from tests.support.user_projects import make_project

pytestmark = [AS_ROOT, pytest.mark.slow]

EXPLORE = """
import json, os, resource, subprocess, sys
from pathlib import Path

def tried(act):
    try:
        act()
        return "done"
    except Exception as error:
        return getattr(error, "strerror", None) or type(error).__name__

def explore(out, home, service, snapshot):
    lines = Path("/proc/self/status").read_text().splitlines()
    status = {line.split(":")[0]: line.split(":")[1].split() for line in lines}
    found = {
        "uid": status["Uid"], "gid": status["Gid"], "groups": status["Groups"], "nnp": status["NoNewPrivs"],
        "capabilities": [status[name][0] for name in ("CapPrm", "CapEff", "CapBnd")],
        "root again": tried(lambda: os.setuid(0)),
        "database": tried(lambda: open(f"{home}/ratchet.db", "rb").read()),
        "names of the home": tried(lambda: os.listdir(home)),
        "names of the jobs": tried(lambda: os.listdir(f"{home}/jobs")),
        "a file in the home": tried(lambda: open(f"{home}/made", "w")),
        "the address": tried(lambda: open(f"{home}/service.json").read()),
        "environment of the service": tried(lambda: open(f"/proc/{service}/environ", "rb").read()),
        "end the service": tried(lambda: os.kill(service, 0)),
        "code to change": tried(lambda: open(f"{snapshot}/explored.py", "a")),
        "code to replace": tried(lambda: os.rename(f"{snapshot}/explored.py", f"{snapshot}/x.py")),
        "code to unlock": tried(lambda: os.chmod(snapshot, 0o777)),
        "variables": sorted(name for name, value in os.environ.items() if "top-secret" in value),
        "HOME": os.environ["HOME"],
        "limits": [resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)],
    }
    with open(out + ".new", "w") as file:
        json.dump(found, file)
    os.rename(out + ".new", out)
"""
SCRIPT = """
import os, sys, time
import explored
out, home, service = sys.argv[1:]
launch = __import__("json").load(open(os.environ["RATCHET_LAUNCH_FILE"]))
explored.explore(out, home, int(service), launch["code_dir"])
print("explored", flush=True)
"""
HOOK = """
import os
import explored
explored.explore(os.environ["OUT"], os.environ["AT"], int(os.environ["SERVICE"]), os.path.dirname(__file__))
def f(state, bucket): ...
class T:
    def build(self, ctx): ...
    def loss(self, model, batch): ...
"""
DENIED = "Permission denied"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with open_directory() as root:
        (root / "out").mkdir()
        (root / "out").chmod(0o777)
        yield root


@pytest.fixture(scope="module")
def confined(place: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATCHET_TOKEN_OF_SOMETHING", "top-secret")
        patch.setenv("PGPASSWORD", "top-secret")
        prefix = command_prefix(place)
        options = ("--run-as", f"{UID}:{UID}", "--auth", "token", "--code-root", str(place / "projects"))
        options += ("--run-as-limits", "processes=3000,file_size=2Gi")
        server = Server(place / "home", *options, afresh=True, prefix=prefix)
        try:
            server.start().use_admin_token()
            yield server
        finally:
            server.stop()


def project(place: Path, folder: str = "projects", **texts: str) -> Path:
    """A directory that nobody but the service can look into."""
    root = place / folder
    root.mkdir(mode=0o700, exist_ok=True)
    code = root / "-".join(texts)
    code.mkdir()
    (code / "explored.py").write_text(EXPLORE)
    for name, text in texts.items():
        (code / f"{name}.py").write_text(text)
    return code


def assert_harmless(found: dict[str, Any]) -> None:
    assert found["uid"] == found["gid"] == [str(UID)] * 4 and found["groups"] == [str(UID)] and found["nnp"] == ["1"]
    assert set(found["capabilities"]) == {"0" * 16} and found["root again"] == "Operation not permitted"
    kept = ("database", "names of the home", "names of the jobs", "a file in the home", "environment of the service")
    assert {name: found[name] for name in kept} == dict.fromkeys(kept, DENIED)
    assert found["end the service"] == "Operation not permitted" and found["the address"] == "done"
    assert {found[name] for name in ("code to change", "code to replace")} == {DENIED}
    assert found["code to unlock"] == "Operation not permitted"
    assert found["variables"] == [] and found["HOME"] == "/" and found["limits"] == [3000, 2 << 30]


def test_rank_under_run_as_is_confined(confined: Server, place: Path) -> None:
    assert confined.process is not None
    code, out = project(place, "elsewhere", train=SCRIPT), place / "out" / "rank"
    script = ["train.py", str(out), str(confined.home), str(confined.process.pid)]
    world = {"ranks_per_node": 1, "device": "cpu"}
    spec = {"name": "explores", "script": script, "code": {"path": str(code)}, "world": world}
    confined.call("POST", "/v1/jobs", json=spec, expect=422)  # no --code-root has it
    with RatchetClient(confined.url, token=confined.token) as client:
        job_id = client.submit(spec, upload=True).id
    confined.wait_phase(job_id, "SUCCEEDED")
    assert_harmless(json.loads(out.read_text()))
    lines = confined.call("GET", f"/v1/jobs/{job_id}/logs").json()["items"]
    assert any(line["text"] == "explored" for line in lines)
    assert (confined.home.stat().st_mode & 0o777, confined.paths.database.stat().st_mode & 0o777) == (0o711, 0o600)
    confined.call("DELETE", f"/v1/jobs/{job_id}")
    assert not confined.paths.job(job_id).root.exists()


def test_hook_inspection_under_run_as_is_confined(confined: Server, place: Path) -> None:
    assert confined.process is not None
    code, out = project(place, mine=HOOK), place / "out" / "look"
    more = {"OUT": str(out), "AT": str(confined.home), "SERVICE": str(confined.process.pid)}
    spec = {"name": "looks", "task": {"entrypoint": "mine:T"}, "code": {"path": str(code)}, "env": more}
    spec |= {"world": {"ranks_per_node": 2, "device": "cpu"}, "hook": {"name": "custom", "hook": "mine:f"}}
    confined.call("POST", "/v1/jobs?dry_run=true", json=spec)
    assert_harmless(json.loads(out.read_text()))


BUILD = """
import explored, json, os, tempfile
def find():
    home, service, code = os.environ["AT"], int(os.environ["SERVICE"]), os.environ["SNAPSHOT"]
    with tempfile.TemporaryDirectory() as folder:
        explored.explore(folder + "/found", home, service, code)
        found = json.load(open(folder + "/found"))
    found["a file elsewhere"] = explored.tried(lambda: open(os.environ["OPEN_TO_ALL"], "w"))
    found["jobs"] = explored.tried(lambda: os.listdir(home + "/jobs"))
    found["processes"] = len([name for name in os.listdir("/proc") if name.isdigit()])
    return found
"""


def test_requirements_are_built_as_the_jobs_user_and_recorded(confined: Server, place: Path) -> None:
    """The build of a package finds no variables of the service, and cannot write to what its own user may write to otherwise."""
    assert confined.process is not None
    wheels = place / "wheels"
    wheels.mkdir()
    make_sdist(
        wheels, "hostile", "1.0", EXPLORE + BUILD.replace("import explored, ", "import ").replace("explored.", "")
    )
    make_wheel(wheels, "pleasant", "1.0", "")
    make_wheel(wheels, "pleasant", "2.0", "")
    code = make_project(place / "projects" / "requires")
    with (code / "mine.py").open("a") as file:
        file.write("\nimport hostile\n")  # found by the ranks' interpreter alone
    (code / "requirements.txt").write_text("# ours\n-r more/base.txt\nhostile\n")
    (code / "more").mkdir()
    (code / "more" / "base.txt").write_text("pleasant \\\n  == 1.0  # this one\n")
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "AT": str(confined.home), "SNAPSHOT": str(place)}
    env |= {"SERVICE": str(confined.process.pid), "OPEN_TO_ALL": str(place / "out" / "written")}
    spec = {
        "name": "requires", "code": {"path": str(code)}, "world": {"ranks_per_node": 1, "device": "cpu"}, "env": env,
        "task": {"entrypoint": "mine:Mine", "args": {"steps": 8}}, "checkpoint": {"every_steps": 6, "keep_last": 2},
        "environment": {"requirements": "requirements.txt"},
    }  # fmt: skip
    job_id = confined.submit(spec)
    assert confined.job(job_id)["spec"]["environment"] == {"requirements": ["pleasant == 1.0", "hostile"]}
    confined.wait_phase(job_id, "SUCCEEDED")
    (environment,) = confined.home.glob(f"environments/{UID}/*/ratchet-environment.json")
    assert {path.lstat().st_uid for path in environment.parent.rglob("*")} == {UID}
    source = next(environment.parent.glob("lib/python*/site-packages/hostile.py")).read_text()
    found = ast.literal_eval(source.removeprefix("FOUND = "))
    assert found["uid"] == found["gid"] == [str(UID)] * 4 and found["nnp"] == ["1"] and found["variables"] == []
    assert set(found["capabilities"]) == {"0" * 16} and found["root again"] != "done"
    log = confined.paths.job(job_id).attempt(1).agent_log.read_text()
    assert "not confined" in log or found["processes"] < 10
    for name in ("database", "a file in the home", "environment of the service", "end the service"):
        assert found[name] != "done", name
    assert "not confined" in log or found["a file elsewhere"] == "Read-only file system"
    checkpoint = final_checkpoint(confined, job_id).name
    manifest = confined.call("GET", f"/v1/jobs/{job_id}/checkpoints/{checkpoint}").json()["manifest"]
    digest = json.loads(environment.read_text())["digest"]
    assert manifest["environment"]["provenance:environment"] == digest
    assert {"hostile==1.0", "pleasant==1.0"} <= set(manifest["environment"]["provenance:packages"].split())
    change = {"environment": {"requirements": ["hostile", "pleasant==2.0"]}}
    source = min(confined.paths.job(job_id).checkpoints.glob("*/MANIFEST.json")).parent.name
    body = {"checkpoint_id": source, "spec": change}
    fork = confined.call("POST", f"/v1/jobs/{job_id}/fork", json=body).json()["id"]
    confined.wait_phase(fork, "SUCCEEDED")
    report = confined.attempts(fork)[0]["resume_report"]
    assert {"key": "package:pleasant", "recorded": "1.0", "current": "2.0"} in report["differences"]


@full
def test_run_as_job_resumes_exactly_after_restart_and_preemption(confined: Server, place: Path) -> None:
    gate = place / "out" / "gate"
    gate.mkdir()
    gate.chmod(0o777)
    (gate / "step13").touch()
    code = make_project(place / "projects" / "trains")
    spec: dict[str, Any] = {
        "name": "trains", "code": {"path": str(code)}, "world": {"ranks_per_node": 2, "device": "cpu"},
        "hook": {"name": "powerSGD", "start_powerSGD_iter": 6}, "checkpoint": {"every_steps": 6, "keep_last": 2},
    }  # fmt: skip
    task = {"entrypoint": "mine:Mine", "args": {"steps": 24}}
    quiet = confined.submit({**spec, "task": task})
    gated = confined.submit({**spec, "task": {**task, "args": {"steps": 24, "gate": str(gate)}}})
    wait_for(lambda: (gate / "step13.reached.1").exists(), "the ranks to wait", 90)
    _, paths = confined.wait_step(gated, 12, saved=True)
    pids = [rank_pid(paths, rank) for rank in (0, 1)]
    assert all(procfs.runs_as(pid, UID) for pid in pids)
    confined.kill()
    confined.start()
    shutil.rmtree(code)  # what was submitted is what goes on
    confined.call("POST", f"/v1/jobs/{gated}/preempt")
    wait_freeze(paths, 0)
    (gate / "step13").unlink()
    confined.wait_phase(quiet, "SUCCEEDED")
    confined.wait_phase(gated, "SUCCEEDED")
    first, second = confined.attempts(gated)
    assert (first["cause"], second["base"]["attempt"]) == ("api-preempt", 1)
    report = compare(final_checkpoint(confined, quiet), final_checkpoint(confined, gated))
    assert report.identical, render(report)
    root = confined.paths.job(gated).root
    assert {path.lstat().st_uid for path in (root, *root.rglob("*"))} == {UID} and root.stat().st_mode & 0o077 == 0
    assert len(list((root / "checkpoints").glob("*/MANIFEST.json"))) == 2
    name = final_checkpoint(confined, gated).name
    confined.call("POST", f"/v1/jobs/{gated}/checkpoints/{name}/verify", json={})
    confined.call("POST", f"/v1/jobs/{gated}/checkpoints/{name}/pin", json={"pinned": True})
    assert confined.call("GET", f"/v1/jobs/{gated}/checkpoints/{name}/export").content[8:9] == b"{"
    source = min((root / "checkpoints").glob("*/MANIFEST.json")).parent.name
    fork = confined.call("POST", f"/v1/jobs/{gated}/fork", json={"checkpoint_id": source}).json()["id"]
    confined.wait_phase(fork, "SUCCEEDED")
    assert confined.attempts(fork)[0]["base"]["step"] == 18
    report = compare(final_checkpoint(confined, quiet), final_checkpoint(confined, fork))
    assert report.identical, render(report)
    confined.call("DELETE", f"/v1/jobs/{gated}")
    assert not root.exists() and not list(confined.home.glob("made"))


@full
def test_hang_under_run_as_writes_stacks_and_next_attempt_resumes(confined: Server, place: Path) -> None:
    gate = place / "out" / "hang"
    gate.mkdir()
    gate.chmod(0o777)
    (gate / "step7").touch()
    code = make_project(place / "projects" / "hangs")
    task = {"entrypoint": "mine:Mine", "args": {"steps": 8, "gate": str(gate)}}
    spec = {"name": "hangs", "code": {"path": str(code)}, "world": {"device": "cpu"}, "task": task}
    more = {"checkpoint": {"every_steps": 6}, "policy": {"step_deadline": 3, "backoff": 0.1}}
    job_id = confined.submit({**spec, **more})
    wait_for(lambda: confined.attempts(job_id)[:1] and confined.attempts(job_id)[0]["cause"], "the hang to be seen", 90)
    (gate / "step7").unlink()
    confined.wait_phase(job_id, "SUCCEEDED")
    assert confined.attempts(job_id)[0]["cause"] == "hang"
    log = confined.paths.job(job_id).attempt(1).log(0).read_text()
    assert "mine.py" in log.partition("writes the stacks of its threads")[2], log
