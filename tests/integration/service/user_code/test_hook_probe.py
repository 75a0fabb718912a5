"""A user's own hook is looked at in a process of its own, whatever its module does, and nothing of that process is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.errors import Refused
from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import procfs
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_hooks.specs.hook_specs import CustomSpec
from ratchet_service.api import problem_json as problems
from ratchet_service.launchers.registry import load
from ratchet_service.preflight.resolve import resolve
from ratchet_service.scheduling.machine import Machine
from ratchet_service.submission import local_submission
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.user_code import hook_probe
from ratchet_service.user_code.hook_probe import Probe
from ratchet_service.user_code.interpreter_probe import Interpreters
from ratchet_service.user_code.snapshot import snapshot
from tests.support.fake_interpreters import python_with_answer_of
from tests.support.server import wait_for
from tests.unit.service.preflight.test_resolve import Told

GOOD = "def f(state, bucket): ...\nclass S:\n    def state_dict(self): ...\n    def load_state_dict(self, state): ...\n"
WITHOUT_SAVING = "class Half:\n    def state_dict(self): ...\nclass Plain: ...\n"
MODULES = {
    "good.py": f"{GOOD}{WITHOUT_SAVING}def one(bucket): ...\nnumber = 1\nasync def later(state, bucket): ...\n",
    "pack/__init__.py": "",
    "pack/deep.py": "class Box:\n    @staticmethod\n    def f(state, bucket): ...\n",
    "raising.py": "import json\njson.loads('{')\n",
    "needing.py": "import a_module_that_nobody_has\n",
    "wrong.py": "def f(state, bucket)\n",
    "leaving.py": "import sys\nsys.exit('not today')\n",
    "dying.py": "import os\nos._exit(7)\n",
    "killed.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
    "loud.py": f"import sys\nfor stream in (sys.stdout, sys.stderr):\n    print('x' * 5_000_000, file=stream)\n{GOOD}",
    "endless.py": "while True: pass\n",
    "waiting.py": f"import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\n{GOOD}",
    "greedy.py": "def __getattr__(name): raise KeyboardInterrupt\n",
    "family.py": (
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], start_new_session=True)\n"
        "apart, told = os.pipe()\n"
        "if os.fork() == 0:\n    os.setsid()\n    os.write(told, b'.')\n    import time; time.sleep(3600)\n"
        "os.read(apart, 1)\n"
        f"{GOOD}"
    ),
}

ASKER = """
import os, sys
from ratchet_contract.spec import JobSpec
from ratchet_service.user_code.hook_probe import Probe

spec = JobSpec.model_validate_json(sys.argv[1])
Probe(sys.executable, spec, [sys.argv[2], sys.argv[2] + "/quick"], os.environ, 600.0).check_hook(spec.hook)
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for name, text in MODULES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    # These modules need no torch, and an empty one in its place makes a look take a tenth of the time.
    (root / "quick").mkdir()
    (root / "quick" / "torch.py").touch()
    return root


def job(code: Path, hook: str, **more: Any) -> JobSpec:
    data = {
        "name": "a",
        "task": {"entrypoint": "mine:Mine"},
        "code": {"path": str(code)},
        "env": {"PYTHONPATH": "quick"},
    }
    return JobSpec.model_validate({**data, "hook": {"name": "custom", "hook": hook, **more}})


def look(code: Path, hook: str, **more: Any) -> list[tuple[str, str, str]]:
    spec = job(code, hook, **more)
    _, _, problems = resolve(spec, Machine((), 8), interpreters=Told(), hook_seconds=1.0)
    return [(p.pointer, p.code, p.detail) for p in problems]


@pytest.mark.parametrize(
    ("hook", "more"),
    [
        ("good:f", {}),
        ("good:f", {"state": "good:S"}),
        ("pack.deep:Box.f", {"state": "good:S"}),
        ("loud:f", {}),
        ("waiting:f", {}),
    ],
)
def test_hook_probe_accepts_usable_hooks(code: Path, hook: str, more: dict[str, Any]) -> None:
    assert look(code, hook, **more) == []


@pytest.mark.parametrize(
    ("hook", "more", "pointer", "problem", "word"),
    [
        ("nowhere:f", {}, "/hook/hook", "hook-import-failed", "no module named 'nowhere'"),
        ("pack.nowhere:f", {}, "/hook/hook", "hook-import-failed", "no module named 'pack.nowhere'"),
        ("good:zz", {}, "/hook/hook", "hook-import-failed", "good has no 'zz'; it has: Half, Plain, S"),
        ("raising:f", {}, "/hook/hook", "hook-import-failed", "JSONDecodeError: Expecting property name"),
        ("needing:f", {}, "/hook/hook", "hook-import-failed", "No module named 'a_module_that_nobody_has'"),
        ("wrong:f", {}, "/hook/hook", "hook-import-failed", "SyntaxError: expected ':'"),
        ("leaving:f", {}, "/hook/hook", "hook-import-failed", "SystemExit: not today"),
        ("dying:f", {}, "/hook/hook", "hook-import-failed", "exit code 7"),
        ("killed:f", {}, "/hook/hook", "hook-import-failed", "SIGSEGV"),
        ("endless:f", {}, "/hook/hook", "hook-check-timeout", "longer than 1 s"),
        ("good:one", {}, "/hook/hook", "hook-signature", "good:one(bucket) cannot be called as hook(state, bucket)"),
        ("good:number", {}, "/hook/hook", "hook-signature", "is a int, not a function"),
        ("good:later", {}, "/hook/hook", "hook-signature", "coroutine"),
        ("greedy:f", {}, "/hook/hook", "hook-import-failed", "KeyboardInterrupt"),
        ("good:f", {"state": "good:T"}, "/hook/state", "hook-import-failed", "good has no 'T'"),
        ("good:f", {"state": "good:f"}, "/hook/state", "hook-state-unsupported", "name the class"),
        ("good:f", {"state": "good:Plain"}, "/hook/state", "hook-state-unsupported", "neither __getstate__"),
        ("good:f", {"state": "good:Half"}, "/hook/state", "hook-state-unsupported", "state_dict, but no load_state_dict"),
        ("good:f", {"state": "good:S", "state_args": {"a": 1}}, "/hook/state_args", "hook-state-arguments", "good:S"),
    ],
)  # fmt: skip
def test_hook_probe_reports_each_fault_with_pointer_and_code(
    code: Path, hook: str, more: dict[str, Any], pointer: str, problem: str, word: str
) -> None:
    ((at, found, detail),) = look(code, hook, **more)
    assert (at, found) == (pointer, problem) and word in detail


def test_hook_probe_ends_all_processes_started_by_the_module(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    search = procfs.pids_with_variable

    def spy(name: str, value: str) -> list[int]:
        seen.append(search(name, value))
        return seen[-1]

    monkeypatch.setattr(procfs, "pids_with_variable", spy)
    assert look(code, "family:f") == []
    started = {pid for pids in seen for pid in pids}
    assert len(started) >= 2 and seen[-1] == []  # those that had left the process group
    # A killed process has no memory left, and so no environment to be found by, an instant before it is a zombie.
    wait_for(lambda: all(procfs.start_time(pid) is None for pid in started), "all of them to have ended", 5)
    assert not list(code.rglob("__pycache__"))


def test_hook_probe_imports_the_code_in_the_environment_of_the_ranks(code: Path) -> None:
    (code / "asking.py").write_text(
        "import os\nfrom pathlib import Path\nassert os.environ['CUDA_VISIBLE_DEVICES'] == '' and os.environ['A'] == 'b'\n"
        "assert os.environ['KEY'] == 'x' and 'RATCHET_DATABASE_URL' not in os.environ\n"
        f"assert Path.cwd() == Path({str(code)!r})\n{GOOD}"
    )
    spec = job(code, "asking:f").model_dump(mode="json")
    spec |= {"env": {**spec["env"], "A": "b"}, "secrets": {"KEY": {"from_env": "TOKEN"}}}
    environ = {**os.environ, "TOKEN": "x", "RATCHET_DATABASE_URL": "postgresql://u:pw@h/d", "CUDA_VISIBLE_DEVICES": "0"}
    found = resolve(JobSpec.model_validate(spec), Machine((), 8), interpreters=Told(), environ=environ)
    assert found[2] == []


def test_hook_beside_a_script_in_a_subdirectory_is_found_as_the_ranks_find_it(code: Path) -> None:
    (code / "train").mkdir(exist_ok=True)
    (code / "train" / "main.py").write_text("from ratchet_worker.session import Session\n")
    place = f"from pathlib import Path\nassert Path.cwd() == Path({str(code)!r}) and __file__ == {{}}\n{GOOD}"
    for file in ("train/beside.py", "train/both.py", "below.py"):
        (code / file).write_text(place.format(repr(str(code / file))))
    (code / "both.py").write_text("")
    for hook in ("beside:f", "both:f", "below:f"):
        spec = job(code, hook).model_copy(update={"script": ["train/main.py"], "task": None})
        assert resolve(spec, Machine((), 8), interpreters=Told())[2] == [], hook


def test_interpreter_query_passes_no_service_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
    python.chmod(0o755)
    monkeypatch.setenv("RATCHET_DATABASE_URL", "postgresql://u:secret-word@h/d")
    monkeypatch.setenv("PLAIN", "kept")
    assert "did not answer" in str(Interpreters().query(str(python)).error)
    seen = (tmp_path / "seen").read_text()
    assert "PLAIN=kept" in seen and "secret-word" not in seen


def test_hook_probe_whose_parent_has_ended_imports_nothing(code: Path, tmp_path: Path) -> None:
    """Killed before the process had asked the kernel to end with it, which would leave a look without a limit."""
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    request = {"asker": gone.pid, "path": [str(code), str(code / "quick")], "hook": "endless:f"}
    answer = tmp_path / "answer"
    with answer.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ratchet_hooks.probe"], pass_fds=[file.fileno()], capture_output=True,
            input=json.dumps({**request, "answer": file.fileno()}).encode(), timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1 and b"ProcessLookupError" in done.stderr and answer.read_bytes() == b""


def test_killed_parent_of_a_hook_probe_leaves_no_process_and_no_file(code: Path, tmp_path: Path) -> None:
    (code / "stuck.py").write_text(
        f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\nwhile True: pass\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "asker.py").write_text(ASKER)
    asker = subprocess.Popen(
        [sys.executable, str(tmp_path / "asker.py"), job(code, "stuck:f").model_dump_json(), str(code)],
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the look"))
        asker.kill()
        wait_for(lambda: procfs.start_time(pid) is None, "the look to end", 10)
    finally:
        asker.kill()
        asker.wait()
    assert list(temporary.iterdir()) == []


@contextmanager
def two_inspections(ports: LocalSubmission, held: JobSpec, going: Path, go: Path) -> Iterator[None]:
    """Two threads resolve ``held`` during the block, without a problem. Each inspection puts a file into ``going`` and ends once
    ``go`` exists."""
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(ports.resolve(held)[2]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: len(list(going.iterdir())) == 2, "both inspections to begin")
        yield
    finally:
        go.touch()
        for thread in threads:
            thread.join()
    assert found == [0] * 2


def test_hook_probes_beyond_the_concurrency_limit_answer_503(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take the threads through which agents report."""
    going, go = tmp_path / "going", tmp_path / "go"
    going.mkdir()
    (code / "held.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(going)!r}, str(os.getpid())).touch()\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n{GOOD}"
    )
    (code / "train.py").write_text("from ratchet_worker.session import Session\n")
    home = HomePaths(tmp_path / "home")
    monkeypatch.setattr(local_submission, "MAX_INSPECTIONS", 2)
    ports = LocalSubmission(home, Machine((), 8), load(home, None))
    held = job(code, "held:f").model_copy(update={"script": ["train.py"], "task": None})
    with two_inspections(ports, held, going, go):
        with pytest.raises(Refused, match="try again") as refused:
            ports.resolve(held)
        assert problems.status_of(refused.value) == 503
        plain = held.model_copy(update={"hook": JobSpec.model_validate({**held.model_dump(), "hook": "noop"}).hook})
        assert ports.resolve(plain)[2] == []
    assert ports.resolve(held)[2] == []


def test_queries_of_the_submitters_interpreters_beyond_the_concurrency_limit_answer_503(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take the same threads."""
    going, go, python = tmp_path / "going", tmp_path / "go", tmp_path / "python"
    going.mkdir()
    python.write_text(
        f'#!/bin/sh\ntouch {going}/$$\nwhile [ ! -e {go} ]; do sleep 0.01; done\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (code / "train.py").write_text("from ratchet_worker.session import Session\n")
    home = HomePaths(tmp_path / "home")
    monkeypatch.setattr(local_submission, "MAX_INSPECTIONS", 2)
    ports = LocalSubmission(home, Machine((), 8), load(home, None))
    plain = JobSpec.model_validate({"name": "a", "script": ["train.py"], "code": {"path": str(code)}})
    held = plain.model_copy(update={"python": str(python)})
    with two_inspections(ports, held, going, go):
        with pytest.raises(Refused, match="try again"):
            ports.resolve(held)
        assert ports.resolve(plain)[2] == []
    assert ports.resolve(held)[2] == []


def test_hook_of_an_interpreter_whose_torch_loads_slowly_is_left_to_the_first_attempt(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_probe, "START_SECONDS", 1.0)
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")  # as from a network disk
    spec = job(code, "good:f").model_copy(update={"env": {"PYTHONPATH": str(tmp_path)}})
    _, warnings, problems = resolve(spec, Machine((), 8), interpreters=Told(), hook_seconds=5.0)
    assert problems == []
    (text,) = [w.detail for w in warnings if (w.pointer, w.code) == ("/hook/hook", "hook-not-checked")]
    assert "took longer than 1 s to import torch, so the hook was not imported" in text


def test_hook_is_not_blamed_for_an_interpreter_that_cannot_be_started(code: Path) -> None:
    spec = job(code, "good:f")
    assert isinstance(spec.hook, CustomSpec)
    (problem,) = Probe("/nowhere/python", spec, [str(code)], os.environ).check_hook(spec.hook)
    assert "no process could be started" in problem.detail and "ended" not in problem.detail


@pytest.mark.parametrize(
    "shapes", ["[1]", '[["x"]]', "[[Infinity]]", "[[-1]]", "[null]", "{}", f"[[{'9' * 4000}, {'9' * 4000}]]"]
)
def test_malformed_shapes_of_user_code_are_unknown_shapes(tmp_path: Path, shapes: str) -> None:
    (tmp_path / "answer").write_text(f'{{"shapes": {shapes}}}')
    python = python_with_answer_of(tmp_path, tmp_path / "answer")
    spec = JobSpec.model_validate({"name": "a", "task": {"entrypoint": "mine:Mine"}, "hook": "powerSGD"})
    assert Probe(str(python), spec, [], os.environ).shapes() is None


def test_hook_is_not_probed_for_jobs_of_other_machines(code: Path) -> None:
    _, warnings, problems = resolve(job(code, "endless:f"), Machine((), 8, is_this_machine=False), interpreters=Told())
    assert problems == [] and ("/hook/hook", "hook-not-checked") in [(w.pointer, w.code) for w in warnings]


def test_builtin_hook_starts_no_probe_process(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "_query", lambda *_: pytest.fail("a process was started"))
    spec = job(code, "good:f").model_copy(
        update={"hook": JobSpec.model_validate({**job(code, "good:f").model_dump(), "hook": "powerSGD"}).hook}
    )
    assert resolve(spec, Machine((), 8), interpreters=Told())[2] == []
    broken = spec.model_copy(update={"hook": job(code, "good:f").hook, "python": "/nowhere/python"})
    assert [p.code for p in resolve(broken, Machine((), 8, python=sys.executable))[2]] == ["python-not-found"]


def test_hook_probe_of_an_existing_job_uses_its_code_snapshot(code: Path, tmp_path: Path) -> None:
    """A resume or a fork under another hook runs the code of before, whatever has become of the user's directory."""
    live = tmp_path / "live"
    live.mkdir()
    (live / "mine.py").write_text(GOOD)
    (live / "train.py").write_text("from ratchet_worker.session import Session\n")
    digest = snapshot(live, tmp_path / "home" / "code")
    (live / "mine.py").write_text("")
    home, machine = HomePaths(tmp_path / "home"), Machine((), 8)
    ports = LocalSubmission(home, machine, load(home, None))
    spec = job(live, "mine:f", state="mine:S").model_copy(update={"script": ["train.py"], "task": None})
    spec = spec.model_copy(update={"env": {"PYTHONPATH": str(code / "quick")}})
    seen = [[p.detail for p in ports.resolve(spec, given)[2] if p.pointer == "/hook/hook"] for given in (None, digest)]
    assert seen == [["mine has no 'f'; it has: nothing"], []]

    # By the interpreter that the job names; where it names none, by the service's of today, as its next attempt.
    decided = Resolved(device="cpu", backend="gloo", threads_per_rank=1, python=sys.executable, code_digest=digest)
    assert ports.check_hook_change(spec, decided)[1] == []
    gone = decided.model_copy(update={"python": "/nowhere/python"})
    assert ports.check_hook_change(spec, gone)[1] == []
    [problem] = ports.check_hook_change(spec.model_copy(update={"python": "/nowhere/python"}), gone)[1]
    assert problem.code == "hook-import-failed" and "with /nowhere/python" in problem.detail

    many = {"name": "many", "task": {"entrypoint": "tasks:Mine"}, "world": {"ranks_per_node": 16}}
    found, _ = ports.check_hook_change(JobSpec.model_validate(many | {"hook": "quantization_pertensor"}), decided)
    assert [w.code for w in found if w.pointer == "/world/ranks_per_node"] == ["hook-caution"]
