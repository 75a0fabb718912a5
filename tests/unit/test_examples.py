"""The examples are what they claim to be: valid specs whose code exists, and a picture that any viewer can open."""

from __future__ import annotations

import ast
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.demo.picture import Interruption, draw
from examples.demo.story import SPEC
from ratchet_contract.spec_parse import load_spec_text, parse_spec

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_a_spec_file_is_valid_and_names_code_that_exists(file: Path) -> None:
    _check(load_spec_text(file.read_text()))


def test_the_demos_spec_is_valid() -> None:
    _check({"name": "demo", **SPEC})


def _check(data: dict[str, object]) -> None:
    spec = parse_spec(data)
    code = EXAMPLES / spec.code.path if spec.code else None
    if spec.script is not None:
        assert code is not None and (code / spec.script[0]).is_file()
        return
    assert spec.task is not None
    module, _, name = spec.task.entrypoint.partition(":")
    found = find_spec(module) if code is None else None
    path = Path(found.origin) if found is not None and found.origin else (code or EXAMPLES) / f"{module}.py"
    classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    made = next(n for n in classes[name].body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    assert set(spec.task.args) <= {argument.arg for argument in made.args.args}


def test_the_users_project_has_modules_with_names_that_a_tool_might_take() -> None:
    assert {"hooks.py", "worker.py", "service.py"} <= {path.name for path in (EXAMPLES / "user_project").iterdir()}


def test_the_picture_is_an_svg_with_both_curves_and_every_interruption(tmp_path: Path) -> None:
    points = [(step, 2.0 / step) for step in range(1, 50)] + [(50, float("nan")), (51, 0.04)]
    marks = [Interruption(30, 20, "rank <killed>", "#d62828"), Interruption(40, None, "service & killed", "#2a9d8f")]
    draw(tmp_path / "loss.svg", points, points, marks)
    root = ElementTree.parse(tmp_path / "loss.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    texts = {element.text for element in root.iter(f"{name}text")}
    assert len(list(root.iter(f"{name}path"))) == 2 and {"rank <killed>", "service & killed"} <= texts
    assert len(list(root.iter(f"{name}rect"))) == 2, "the background, and one band over steps done again"
    assert all(path.get("d", "").count("M") == 2 for path in root.iter(f"{name}path")), "the line breaks at NaN"
