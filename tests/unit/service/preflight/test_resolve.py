"""Specs against machines: what is refused and where, what is warned of, and what every ``auto`` becomes."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.code.tree import Limits
from ratchet_contract.paths import HomePaths
from ratchet_contract.spec.job import JobSpec, Resolved, TaskSpec
from ratchet_hooks.specs.registry import HOOKS
from ratchet_hooks.torch_versions import TESTED
from ratchet_service.launchers.registry import load
from ratchet_service.lifecycle import unmanaged_script
from ratchet_service.preflight import entrypoint
from ratchet_service.preflight.resolve import resolve
from ratchet_service.scheduling.machine import Machine, read_machine, write_machine
from ratchet_service.user_code.interpreter_probe import Findings, Interpreters

CPU = Machine((), 8)
GPUS = Machine((0, 1, 2, 3), 32)


class Told(Interpreters):
    """Answers what a test says an interpreter would."""

    def __init__(self, **findings: Any) -> None:
        super().__init__()
        self.findings = Findings(**{"version": (3, 11, 0), "protocol": 1, "torch": True, **findings})

    def query(self, python: str, **_: Any) -> Findings:
        return self.findings


def spec(**more: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "a", "task": {"entrypoint": "mine:Mine"}, **more})


def run(machine: Machine = CPU, told: Interpreters | None = None, **more: Any) -> tuple[Resolved, set[str], set[str]]:
    """The resolution, and warnings and problems as ``pointer code``; of a stored spec, which has all defaults, the same ones."""
    given = spec(**more)
    found, again = (
        resolve(one, machine, interpreters=told or Told(), environ={"TOKEN": "x"})
        for one in (given, JobSpec.model_validate(given.model_dump(mode="json")))
    )
    assert found == again
    resolved, warnings, problems = found
    return resolved, {f"{w.pointer} {w.code}" for w in warnings}, {f"{p.pointer} {p.code}" for p in problems}


@pytest.mark.parametrize(
    ("machine", "cuda", "more", "expected"),
    [
        (CPU, False, {}, ("cpu", "gloo", 8)),
        (CPU, False, {"world": {"ranks_per_node": 3}}, ("cpu", "gloo", 2)),
        (CPU, False, {"world": {"ranks_per_node": 20}}, ("cpu", "gloo", 1)),
        (CPU, False, {"resources": {"cpus_per_rank": 5}}, ("cpu", "gloo", 5)),
        (CPU, False, {"env": {"OMP_NUM_THREADS": "3"}}, ("cpu", "gloo", 3)),
        (GPUS, True, {"world": {"ranks_per_node": 2}}, ("cuda", "nccl", 8)),
        (GPUS, True, {"world": {"ranks_per_node": 2, "device": "cpu"}}, ("cpu", "gloo", 16)),
        (GPUS, True, {"ddp": {"backend": "gloo"}}, ("cuda", "gloo", 8)),
        (GPUS, False, {}, ("cpu", "gloo", 32)),
    ],
)
def test_auto_device_backend_and_threads_are_resolved(
    machine: Machine, cuda: bool, more: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    resolved, _, problems = run(machine, Told(torch_cuda=cuda), **more)
    assert problems == set()
    assert (resolved.device, resolved.backend, resolved.threads_per_rank) == expected
    assert resolved.python == sys.executable


@pytest.mark.parametrize(
    ("machine", "told", "more", "problem"),
    [
        (CPU, {}, {"world": {"device": "cuda"}}, "/world/device no-gpu"),
        (CPU, {}, {"ddp": {"backend": "nccl"}}, "/ddp/backend backend-device"),
        (GPUS, {"torch_cuda": True}, {"world": {"ranks_per_node": 5}}, "/world/ranks_per_node too-few-gpus"),
        (GPUS, {}, {"world": {"device": "cuda"}}, "/world/device torch-without-cuda"),
        (CPU, {}, {"secrets": {"KEY": {"from_env": "NOT_SET"}}}, "/secrets/KEY secret-missing"),
        (CPU, {}, {"python": "/nowhere/python"}, "/python python-not-found"),
        (CPU, {}, {"python": "venv"}, "/python python-not-found"),
        (CPU, {"error": "it could not be run"}, {}, "/python python-unusable"),
        (CPU, {"worker_error": "ModuleNotFoundError"}, {}, "/python worker-missing"),
        (CPU, {"protocol": 99}, {}, "/python protocol-mismatch"),
        (CPU, {"torch": False}, {}, "/python torch-missing"),
        (CPU, {"torch_version": "2.8.1+cpu"}, {}, "/python torch-version"),
        (CPU, {"version": (3, 9, 18), "worker_error": "SyntaxError"}, {}, "/python python-too-old"),
        (CPU, {"missing": "mine"}, {}, "/task/entrypoint module-not-found"),
        (CPU, {"syntax": "mine.py, line 3"}, {}, "/task/entrypoint syntax-error"),
        (CPU, {}, {"code": {"path": "/nowhere"}}, "/code/path not-a-directory"),
        (CPU, {}, {"code": {"path": "here"}}, "/code/path relative-path"),
    ],
)
def test_impossible_spec_is_refused_with_pointer(
    machine: Machine, told: dict[str, Any], more: dict[str, Any], problem: str
) -> None:
    assert run(machine, Told(**told), **more)[2] == {problem}


@pytest.mark.parametrize(
    ("machine", "more", "warning"),
    [
        (CPU, {"world": {"ranks_per_node": 9}}, "/world/ranks_per_node oversubscribed"),
        (CPU, {"nccl": {"NCCL_DEBUG": "INFO"}}, "/nccl no-effect"),
        (CPU, {"policy": {"backoff": "10m"}}, "/policy/backoff capped"),
        (CPU, {"policy": {"timeout": "1m"}}, "/policy/timeout shorter-than-grace"),
        (CPU, {"checkpoint": {"every_steps": None}}, "/checkpoint/every_steps no-schedule"),
    ],
)
def test_spec_value_without_effect_or_with_cost_is_warned(machine: Machine, more: dict[str, Any], warning: str) -> None:
    _, warnings, problems = run(machine, **more)
    assert (warnings, problems) == ({warning}, set())


@pytest.mark.parametrize(
    ("kind", "more", "threads", "warned"),
    [
        ("slurm", {}, 1, ["single-thread"]),
        ("slurm", {"resources": {"cpus_per_rank": 3}}, 3, []),
        ("slurm", {"env": {"OMP_NUM_THREADS": "3"}}, 3, ["oversubscribed"]),
        ("local", {}, 8, []),
    ],
)
def test_rank_has_all_cores_of_a_laptop_and_a_warning_of_one_thread_on_an_engine(
    tmp_path: Path, kind: str, more: dict[str, Any], threads: int, warned: list[str]
) -> None:
    file = tmp_path / "launchers.yaml"
    file.write_text("local: {}\nslurm: {python: /opt/ratchet/bin/python}\n")
    job, launchers = spec(launcher={"kind": kind}, **more), load(HomePaths(tmp_path), file)
    resolved, warnings, problems = resolve(job, CPU, launchers=launchers, interpreters=Told(), environ={})
    assert (resolved.threads_per_rank, [w.code for w in warnings], problems) == (threads, warned, [])


@pytest.mark.parametrize("version", ["2.99.0+cpu", "3.0.0"])
def test_untested_torch_version_is_a_warning(version: str) -> None:
    _, warnings, problems = run(CPU, Told(torch_version=version))
    assert (warnings, problems) == ({"/python torch-untested"}, set())
    assert run(CPU, Told(torch_version=f"{TESTED[-1]}.1+cu130"))[1:] == (set(), set())


def test_a_plain_spec_has_no_warnings() -> None:
    assert run(world={"ranks_per_node": 2}, secrets={"KEY": {"from_env": "TOKEN"}})[1:] == (set(), set())


TWO = {"world": {"ranks_per_node": 2}}
CAUTION = "/hook hook-caution"


@pytest.mark.parametrize(
    ("machine", "more", "expected"),
    [
        (CPU, {"hook": "fp16_compress"}, {"/hook single-rank", CAUTION}),
        (CPU, {**TWO, "hook": "powerSGD"}, {CAUTION}),
        (CPU, {**TWO, "hook": {"name": "allreduce", "wrapper": "fp16"}}, {"/hook/wrapper hook-caution"}),
        (CPU, {**TWO, "hook": {"name": "allreduce", "wrapper": "bf16"}}, {"/hook/wrapper hook-caution"}),
        (CPU, {**TWO, "hook": "post_localSGD"}, {CAUTION, "/hook/subgroup_size no-effect"}),
        (CPU, {**TWO, "hook": {"name": "post_localSGD", "subgroup_size": 1}}, {CAUTION}),
        (
            CPU,
            {
                **TWO,
                "hook": {"name": "post_localSGD", "post_local_gradient_allreduce": False, "model_averaging_period": 1},
            },
            {CAUTION, "/hook/model_averaging_period hook-caution"},
        ),
        (GPUS, {**TWO, "nccl": {"NCCL_NSOCKS_PERTHREAD": 4}}, {"/nccl nccl-tuned"}),
        (GPUS, {**TWO, "env": {"NCCL_SOCKET_NTHREADS": 2}}, {"/env nccl-tuned"}),
        (GPUS, {**TWO, "nccl": {"NCCL_DEBUG": "INFO"}}, set()),
        (CPU, {**TWO, "nccl": {"NCCL_NSOCKS_PERTHREAD": 4}}, {"/nccl no-effect"}),
    ],
)
def test_hook_warnings_depend_on_machine_and_spec(machine: Machine, more: dict[str, Any], expected: set[str]) -> None:
    assert run(machine, Told(torch_cuda=True), **more)[1:] == (expected, set())


CUSTOM = {"hook": "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:noop_hook"}


NO_RESIDUALS = {"name": "powerSGD", "use_error_feedback": False, "warm_start": False}
EVERY_STEP = {"name": "post_localSGD", "start_localSGD_iter": 0, "subgroup_size": 1, "model_averaging_period": 1}


@pytest.mark.parametrize(
    ("hook", "ranks", "cautions"),
    [
        ("fp16_compress", 2, ["become inf in float16"]),
        ("bf16_compress", 2, ["Eight significant bits"]),
        ("powerSGD", 2, ["for the residuals"]),
        (NO_RESIDUALS, 2, []),
        ("batched_powerSGD", 2, ["for the residuals", "much less exact than powerSGD"]),
        ({"name": "powerSGD", "wrapper": "bf16"}, 2, ["eight significant bits", "for the residuals"]),
        (
            {"name": "powerSGD", "wrapper": "fp16"},
            2,
            ["become inf in float16", "P and Q in float16", "for the residuals"],
        ),
        ("post_localSGD", 4, ["Replicas differ", "one more copy"]),
        (EVERY_STEP, 2, ["sends as much as averaging the gradients", "one more copy"]),
        ("post_localSGD", 1, []),
        ("noop", 2, ["the result is wrong"]),
        ("noop", 1, []),
        ("quantization_pertensor", 8, ["Float32 gradients only"]),
        (
            "quantization_pertensor",
            9,
            ["with 9 ranks quantization_pertensor moves more bytes", "Float32 gradients only"],
        ),
        ({"name": "custom", **CUSTOM}, 2, ["Exact only if"]),
        ({"name": "custom", "replicas": "rank", **CUSTOM}, 2, ["parameters may differ", "Exact only if"]),
        ({"name": "custom", "replicas": "rank", **CUSTOM}, 1, ["Exact only if"]),
        ("allreduce", 2, []),
    ],
)
def test_hook_cautions_list_only_those_applying_to_job(hook: Any, ranks: int, cautions: list[str]) -> None:
    found = resolve(
        spec(hook=hook, world={"ranks_per_node": ranks}), replace(CPU, is_this_machine=False), interpreters=Told()
    )
    said = [w.detail for w in found[1] if w.code == "hook-caution"]
    assert found[2] == [] and len(said) == len(cautions), said
    assert all(part in text for part, text in zip(cautions, said, strict=True)), said


@pytest.mark.parametrize("hook", ["post_localSGD", "noop", {"name": "custom", **CUSTOM}])
def test_single_rank_warning_mentions_precision_only_for_lossy_hooks(hook: Any) -> None:
    assert "lose precision" not in str(
        resolve(spec(hook=hook), replace(CPU, is_this_machine=False), interpreters=Told())[1]
    )
    for rounds in ("powerSGD", {"name": "allreduce", "wrapper": "bf16"}):
        found = resolve(spec(hook=rounds), replace(CPU, is_this_machine=False), interpreters=Told())[1]
        assert [w.detail for w in found if w.code == "single-rank" and "lose precision" in w.detail], rounds


def test_checkpoint_schedule_by_seconds_is_not_warned() -> None:
    assert run(checkpoint={"every_seconds": 60})[1:] == (set(), set())
    assert run(checkpoint={"every_steps": None})[1:] == ({"/checkpoint/every_steps no-schedule"}, set())


def test_hook_unsupported_by_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none today; the row of the registry decides."""
    monkeypatch.setitem(HOOKS, "noop", replace(HOOKS["noop"], backends=("nccl",)))
    assert run(CPU, hook="noop", **TWO)[2] == {"/ddp/backend hook-backend"}
    assert run(GPUS, Told(torch_cuda=True), hook="noop", **TWO)[2] == set()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "__init__.py").write_text("raise SystemExit('user code was imported')\n")
    task = "    def __init__(self, *, lr=0.1, width): ...\n    def build(self, ctx): ...\n    def loss(self, model, batch): ...\n"
    exit_ = "raise SystemExit('user code was imported')\n"
    (root / "pkg" / "model.py").write_text(f"{exit_}class Mine:\n{task}class Half:\n    def build(self, ctx): ...\n")
    (root / "pkg" / "open.py").write_text(
        f"{exit_}from .model import *\nclass Sub(Mine): ...\n@change\nclass Made: ...\n"
    )
    (root / "hooks.py").write_text(f"{exit_}class Mine(Base): ...\n")
    (root / "typing.py").write_text("raise SystemExit('user code was imported')\n")
    (root / "broken.py").write_text("x = 1\ndef f(:\n")
    (root / "train.py").write_text("print('hello')\n")
    return root


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        ({"task": {"entrypoint": "pkg.model:Mine", "args": {"width": 3}}}, None),
        ({"task": {"entrypoint": "pkg.model:Mine"}}, "/task/args arguments-wrong"),
        ({"task": {"entrypoint": "pkg.model:Mine", "args": {"width": 3, "rl": 1}}}, "/task/args/rl arguments-wrong"),
        ({"task": {"entrypoint": "pkg.model:mine"}}, "/task/entrypoint entrypoint-missing"),
        ({"task": {"entrypoint": "pkg.model:Half"}}, "/task/entrypoint entrypoint-wrong"),
        ({"task": {"entrypoint": "pkg.open:Anything"}}, None),
        ({"task": {"entrypoint": "pkg.open:Sub", "args": {"x": 1}}}, None),
        ({"task": {"entrypoint": "pkg:model.Mine"}}, None),
        ({"task": {"entrypoint": "hooks:Mine"}}, None),
        ({"task": {"entrypoint": "ratchet_worker.task:Parts"}}, None),
        ({"task": {"entrypoint": "pkg.other:Mine"}}, "/task/entrypoint module-not-found"),
        ({"task": {"entrypoint": "nowhere.at_all:Mine"}}, "/task/entrypoint module-not-found"),
        ({"task": {"entrypoint": "broken:Mine"}}, "/task/entrypoint syntax-error"),
        ({"script": ["train.py", "--lr", "1"]}, None),
        ({"script": ["absent.py"]}, "/script/0 script-not-found"),
        ({"script": ["broken.py"]}, "/script/0 syntax-error"),
    ],
)
def test_task_entrypoint_is_checked_without_import(code: Path, job: dict[str, Any], problem: str | None) -> None:
    made = JobSpec.model_validate({"name": "a", "code": {"path": str(code)}, **job})
    _, _, problems = resolve(made, CPU)
    assert [f"{p.pointer} {p.code}" for p in problems] == ([] if problem is None else [problem])


def test_huge_sparse_script_is_refused_without_reading_it_whole(code: Path) -> None:
    (code / "huge.py").touch()
    os.truncate(code / "huge.py", 1 << 40)
    (code / ".ratchetignore").write_text("huge.py\n")  # so that the limits of a snapshot do not apply
    made = JobSpec.model_validate({"name": "a", "code": {"path": str(code)}, "script": ["huge.py"], "hook": "noop"})
    (problem,) = resolve(made, CPU, interpreters=Told())[2]
    assert (problem.pointer, problem.code) == ("/script/0", "unreadable") and "more than 16 MiB" in problem.detail
    assert unmanaged_script.read_main_file(made) is None


@pytest.mark.parametrize(
    ("more", "warnings", "problems"),
    [
        ({}, ["/script unmanaged-script"], []),
        ({"checkpoint": {"every_steps": None}, "hook": "allreduce"}, ["/script unmanaged-script"], []),
        (
            {"checkpoint": {"every_steps": 50}},
            ["/script unmanaged-script", "/checkpoint/every_steps checkpoint-needs-session"],
            [],
        ),
        (
            {"hook": "noop"},
            ["/script unmanaged-script", "/hook hook-caution"],
            ["/hook hook-needs-session"],
        ),
        ({"trial": {}}, ["/script unmanaged-script", "/trial trial"], ["/script trial-needs-session"]),
    ],
)
def test_unmanaged_script_is_warned_and_gets_no_hook(
    code: Path, more: dict[str, Any], warnings: list[str], problems: list[str]
) -> None:
    data = {"name": "a", "code": {"path": str(code)}, "world": {"ranks_per_node": 2, "device": "cpu"}, **more}

    def found(script: str) -> tuple[list[str], list[str]]:
        given = JobSpec.model_validate({**data, "script": [script]})
        _, said, refused = resolve(given, CPU, interpreters=Told())
        stored = JobSpec.model_validate(given.model_dump(mode="json"))
        assert resolve(stored, CPU, interpreters=Told())[1:] == (said, refused)
        return [f"{w.pointer} {w.code}" for w in said], [f"{p.pointer} {p.code}" for p in refused]

    assert found("train.py") == (warnings, problems)
    (code / "managed.py").write_text("from ratchet_worker.session import Session\n")
    assert found("managed.py")[1] == [] and "unmanaged" not in str(found("managed.py"))


def test_start_from_is_refused_for_a_script_without_a_session(code: Path) -> None:
    (code / "model.pt").write_bytes(b"PK\x03\x04")
    (code / "managed.py").write_text("from ratchet_worker.session import Session\n")
    data = {"name": "a", "code": {"path": str(code)}, "start_from": {"path": str(code / "model.pt")}}
    for script, expected in (("train.py", ["/start_from import-unmanaged"]), ("managed.py", [])):
        made = JobSpec.model_validate({**data, "script": [script]})
        assert [f"{p.pointer} {p.code}" for p in resolve(made, CPU, interpreters=Told())[2]] == expected


@pytest.mark.parametrize("wrong", ["circle", "dangling", "deep", "long", "pipe"])
def test_a_directory_that_cannot_be_copied_is_refused(code: Path, wrong: str) -> None:
    path = str(code)
    if wrong == "circle":
        (code / "a").symlink_to("b")
        (code / "b").symlink_to("a")
    elif wrong == "dangling":
        (code / "a").symlink_to("/nowhere")
    elif wrong == "deep":
        (code / "/".join(["d" * 200] * 6)).mkdir(parents=True)
        (code / "/".join(["d" * 200] * 6) / "x").touch()
    elif wrong == "long":
        path = "/" + "x" * 5000
    else:
        os.mkfifo(code / "pipe")
    _, _, problems = resolve(spec(code={"path": path}), CPU, interpreters=Told())
    assert [p.pointer for p in problems] == ["/code/path"]


@pytest.mark.parametrize("given", ["/bin/echo", "/bin/cat", "/" + "x" * 5000])
def test_invalid_python_interpreter_is_refused(given: str) -> None:
    _, _, problems = resolve(spec(python=given), CPU)
    assert [p.pointer for p in problems] == ["/python"]


@pytest.mark.parametrize("name", ["RATCHET_DATABASE_URL", "PGPASSWORD", "COPY"])
def test_service_credentials_are_refused_as_job_secrets(name: str) -> None:
    environ = {"RATCHET_DATABASE_URL": "postgresql://u:pw@h/d", "COPY": "postgresql://u:pw@h/d", "PGPASSWORD": "pw"}
    made = spec(secrets={"KEY": {"from_env": name}})
    _, _, problems = resolve(made, CPU, interpreters=Told(), environ=environ)
    assert [(p.pointer, p.code) for p in problems] == [("/secrets/KEY", "secret-withheld")]


def test_code_directory_over_file_limit_is_refused(code: Path) -> None:
    made = spec(code={"path": str(code)})
    _, _, problems = resolve(made, CPU, interpreters=Told(), limits=Limits(max_files=3))
    assert [p.code for p in problems] == ["too-large"]


def test_python_given_as_venv_directory_resolves_to_bin_python(tmp_path: Path) -> None:
    bare = tmp_path / "venv"
    (bare / "bin").mkdir(parents=True)
    (bare / "bin" / "python").symlink_to("/usr/bin/env")
    resolved, _, problems = resolve(spec(python=str(bare)), CPU)
    assert resolved.python == str(bare / "bin" / "python")
    assert [p.code for p in problems] == ["python-unusable"]


def test_remote_machine_is_read_from_reconciler_file(tmp_path: Path) -> None:
    assert read_machine(tmp_path) is None
    write_machine(tmp_path, Machine((0, 1), 16, 12, "/there/python"), torch_cuda=True)
    there = read_machine(tmp_path)
    assert there is not None
    assert (there.capacity.gpus, there.capacity.cpus) == ((0, 1), 12)
    made = spec(world={"ranks_per_node": 2}, secrets={"KEY": {"from_env": "ONLY_THERE"}})
    resolved, _, problems = resolve(made, there, environ={})
    assert problems == []
    assert (resolved.device, resolved.python) == ("cuda", "/there/python")


_TASK = "class T:\n    def build(self, ctx): ...\n    def loss(self, model, batch): ...\n"


@pytest.mark.parametrize(
    "source",
    [
        "class T:\n    def build(self, ctx): ...\ndef f(self, model, batch): ...\nT.loss = f\n",
        f"{_TASK}def init(self, width): ...\nT.__init__ = init\n",
        f"{_TASK}    evaluation: object\n",
        f"{_TASK}    def more(self, config):\n        config.evaluation = 1\n",
        "from sys import modules\nmodules[__name__].T = make()\n",
        "import builtins\nbuiltins.exec('T = make()')\n",
        "if x:\n    pass\n" + "elif x:\n    pass\n" * 1500 + _TASK,
        "x = " + "+".join("1" * 5000) + f"\n{_TASK}",
    ],
    ids=["given later", "made later", "only annotated", "of another", "modules", "exec", "long chain", "deep"],
)
def test_entrypoint_check_accepts_unprovable_sources(source: str) -> None:
    args = {"width": 1} if "init" in source else {}
    assert entrypoint.check(source.encode(), TaskSpec(entrypoint="m:T", args=args)) is None


def test_task_module_on_spec_python_path_is_found(code: Path, tmp_path: Path) -> None:
    (code / "src").mkdir()
    (code / "src" / "inner.py").write_text(_TASK)
    for python_path in ("/nowhere:src", str(code / "src")):
        made = {
            "name": "a",
            "code": {"path": str(code)},
            "task": {"entrypoint": "inner:T"},
            "env": {"PYTHONPATH": python_path},
        }
        assert resolve(JobSpec.model_validate(made), CPU)[2] == []
    without = resolve(JobSpec.model_validate(made | {"env": {}}), CPU)[2]
    assert [p.code for p in without] == ["module-not-found"]


def test_script_for_newer_python_or_deeply_nested_is_not_refused(code: Path) -> None:
    (code / "new.py").write_text("type Pair[T] = tuple[T, T\n")
    (code / "deep.py").write_text("x = " + "+".join("1" * 5000) + "\n")
    for script, version, problems in (
        ("new.py", (99, 0, 0), []),
        ("new.py", sys.version_info[:3], ["syntax-error"]),
        ("deep.py", sys.version_info[:3], []),
    ):
        made = JobSpec.model_validate({"name": "a", "code": {"path": str(code)}, "script": [script]})
        assert [p.code for p in resolve(made, CPU, interpreters=Told(version=version))[2]] == problems
    made = JobSpec.model_validate({"name": "a", "code": {"path": str(code)}, "task": {"entrypoint": "deep:T"}})
    assert resolve(made, CPU)[2] == []
