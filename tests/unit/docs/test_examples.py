"""The examples are what they claim to be: valid specs whose code exists, and a picture that any viewer can open."""

from __future__ import annotations

import ast
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from examples.demo import report
from examples.demo.picture import Curve, Interruption, draw
from examples.demo.story import SPEC, Story
from ratchet_contract.paths import HomePaths
from ratchet_contract.spec.job import CodeSpec
from ratchet_contract.spec.parse import load_spec_text, parse_spec
from ratchet_service.launchers.registry import load
from ratchet_service.preflight.resolve import resolve
from ratchet_service.scheduling.machine import Machine
from ratchet_service.user_code.interpreter_probe import Findings, Interpreters
from tests.support.checkpoints import make_checkpoint

EXAMPLES = Path(__file__).parents[3] / "examples"


CLUSTER = EXAMPLES / "cluster"
LOOPS = ("ordinary_loop", "image_loop", "token_loop")
FILES = sorted(
    file
    for place in (".", "hooks", "cluster", *LOOPS, "reference", "trainer_clm", "trainer_glue")
    for file in (EXAMPLES / place).glob("*.yaml")
)
GPUS = Machine(tuple(range(8)), 32)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_spec_file_is_valid_and_names_code_that_exists(file: Path) -> None:
    _check(load_spec_text(file.read_text()), file.parent)


def test_demo_spec_is_valid() -> None:
    _check({"name": "demo", **SPEC}, EXAMPLES)


@pytest.mark.parametrize("seed", [0, 1])
def test_demo_fails_unless_both_final_checkpoints_have_the_same_bits(tmp_path: Path, seed: int) -> None:
    jobs: list[Any] = [SimpleNamespace(id=name, name=name) for name in ("interrupted", "undisturbed")]
    for job, used in zip(jobs, (0, seed), strict=True):
        final = make_checkpoint(HomePaths(tmp_path).job(job.id).checkpoints, 10, seed=used).id
    listed = SimpleNamespace(checkpoints=lambda _: [SimpleNamespace(finished=True, id=final)])
    story = Story(SimpleNamespace(home=tmp_path, client=listed))  # type: ignore[arg-type]
    report.comparison(story, *jobs)
    assert story.faults == ([] if seed == 0 else ["the two final checkpoints are identical, bit for bit"])


def _check(data: dict[str, object], root: Path) -> None:
    spec = parse_spec(data)
    code = root / spec.code.path if spec.code else None
    if spec.script is not None:
        assert code is not None and (code / spec.script[0]).is_file()
        return
    assert spec.task is not None
    module, _, name = spec.task.entrypoint.partition(":")
    found = find_spec(module) if code is None else None
    path = Path(found.origin) if found is not None and found.origin else (code or root) / f"{module}.py"
    classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    made = next(n for n in classes[name].body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    assert set(spec.task.args) <= {argument.arg for argument in made.args.args}


# Of torch's and Lightning's pages, one file each: what their state objects and strategies are given.
PAGES: dict[str, dict[str, object]] = {
    "save-reload": {"hook.name": "powerSGD"},
    "fp16-compress": {"hook.name": "fp16_compress"},
    "powersgd": {"hook.name": "powerSGD", "hook.matrix_approximation_rank": 1, "hook.start_powerSGD_iter": 5000},
    "powersgd-fp16-wrapper": {
        "hook.name": "powerSGD", "hook.matrix_approximation_rank": 1, "hook.start_powerSGD_iter": 5000,
        "hook.wrapper": "fp16_compress_wrapper",
    },
    "post-localsgd": {"hook.name": "post_localSGD", "hook.start_localSGD_iter": 8, "hook.model_averaging_period": 4},
    "static-graph": {"ddp.static_graph": True},
    "gradient-as-bucket-view": {"ddp.gradient_as_bucket_view": True},
    "find-unused-parameters": {"ddp.find_unused_parameters": True},
    "nccl": {"nccl.NCCL_NSOCKS_PERTHREAD": "4", "nccl.NCCL_SOCKET_NTHREADS": "2", "world.device": "cuda"},
}  # fmt: skip


def test_hook_example_files_match_documented_values() -> None:
    assert {file.stem for file in (EXAMPLES / "hooks").glob("*.yaml")} == set(PAGES)
    for name, wanted in PAGES.items():
        found = parse_spec(load_spec_text((EXAMPLES / "hooks" / f"{name}.yaml").read_text())).model_dump()
        for key, value in wanted.items():
            section, _, field = key.partition(".")
            assert found[section][field] == value, (name, key)


@pytest.mark.parametrize("name", PAGES)
def test_hook_examples_pass_gpu_preflight_with_expected_warnings(name: str) -> None:
    file = EXAMPLES / "hooks" / f"{name}.yaml"
    spec = parse_spec(load_spec_text(file.read_text()))
    if spec.code is not None:
        spec = spec.model_copy(update={"code": CodeSpec(path=str(file.parent / spec.code.path))})
    resolved, warnings, problems = resolve(spec, GPUS, interpreters=HasCuda())
    assert problems == [] and (resolved.device, resolved.backend) == ("cuda", "nccl")
    expected = {"hook-caution"} if spec.hook.name != "allreduce" else set()
    assert {w.code for w in warnings} == expected | ({"nccl-tuned"} if name == "nccl" else set())


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_cluster_examples_differ_from_laptop_only_in_launcher(kind: str) -> None:
    laptop, cluster = (load_spec_text((CLUSTER / f"{name}.yaml").read_text()) for name in ("laptop", kind))
    assert laptop["launcher"] == {"kind": "local"} and cluster["launcher"]["kind"] == kind
    assert laptop | {"launcher": None} == cluster | {"launcher": None}
    specs = [parse_spec(data) for data in (laptop, cluster)]
    assert specs[0].digest() == specs[1].digest()


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_two_node_examples_are_accepted_by_launchers(kind: str, tmp_path: Path) -> None:
    settings = {
        "slurm": {"python": "/opt/ratchet/bin/python"},
        "kubernetes": {"claim": "home", "url": "http://api:8000", "run_as_user": 10001},
    }
    file = tmp_path / "launchers.yaml"
    file.write_text(yaml.safe_dump({kind: settings[kind]}))
    launchers = load(HomePaths(tmp_path), file)
    spec = parse_spec(load_spec_text((CLUSTER / f"{kind}-two-nodes.yaml").read_text()))
    assert spec.world.nodes == 2 and launchers[kind].check(spec)[1] == []


class HasCuda(Interpreters):
    """An interpreter with a CUDA build of torch, where the code is."""

    def query(self, python: str, *, code: str | None = None, module: str | None = None, **_: Any) -> Findings:
        origin = str(Path(code) / f"{module}.py") if code is not None and module is not None else None
        return Findings(version=(3, 11, 0), protocol=1, torch=True, torch_cuda=True, origin=origin)


def test_user_project_example_has_modules_with_common_names() -> None:
    assert {"hooks.py", "worker.py", "service.py"} <= {path.name for path in (EXAMPLES / "user_project").iterdir()}


def test_loss_plot_svg_has_every_curve_and_interruption(tmp_path: Path) -> None:
    points = [(step, 2.0 / step) for step in range(1, 50)] + [(50, float("nan")), (51, 0.04)]
    marks = [Interruption(30, 20, "rank <killed>", "#d62828"), Interruption(40, None, "service & killed", "#2a9d8f")]
    curves = [Curve("undisturbed", "#222", 5.0, points), Curve("killed & resumed", "#d62828", 1.0, points)]
    draw(tmp_path / "loss.svg", "a title", curves, marks)
    root = ElementTree.parse(tmp_path / "loss.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    texts = {element.text for element in root.iter(f"{name}text")}
    assert len(list(root.iter(f"{name}path"))) == 2 and {"rank <killed>", "service & killed"} <= texts
    assert {"a title", "undisturbed", "killed & resumed"} <= texts
    assert len(list(root.iter(f"{name}rect"))) == 3, "background, legend, and one band over steps done again"
    assert all(path.get("d", "").count("M") == 2 for path in root.iter(f"{name}path")), "the line breaks at NaN"
