"""``docs/python.md`` explains every argument of every public method (``test_docs``: whether it is current)."""

from __future__ import annotations

import re
from typing import Any

import pytest

import ratchet
from ratchet_contract.script.public_names import PUBLIC
from tests.support.docs import ROOT, load_page_generator

CLASSES = ("Session", "TrainLoader", "Task", "Client", "Job")


@pytest.fixture(scope="module")
def made() -> Any:
    return load_page_generator("python")


def test_python_page_has_every_public_name_and_error(made: Any) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    assert [name for name in PUBLIC if f"`{name}`" not in page] == []
    assert len(dict(made.errors())) >= 9 and [name for name, cls in made.errors() if not vars(cls).get("__doc__")] == []


@pytest.mark.parametrize("title", CLASSES)
def test_every_argument_and_attribute_is_explained(made: Any, title: str) -> None:
    cls = getattr(ratchet, title)
    silent = []
    for name, member in made.public(cls):
        if title in ("Job", "Task") and name == "__init__":
            continue
        said = made.text_of(cls, name, member)
        named = set(re.findall(r"\w+", " ".join(re.findall(r"``(.+?)``", said))))
        common = made.COMMON if title == "Client" else {}
        wanted = [] if isinstance(member, property) else made.arguments(member)
        silent += [f"{name}({argument})" for argument in wanted if argument not in named and argument not in common]
        silent += [] if said else [name]
    assert silent == []


@pytest.mark.parametrize("title", ["Session", "Client"])
def test_class_reference_starts_with_constructor(made: Any, title: str) -> None:
    assert next(name for name, _ in made.public(getattr(ratchet, title))) == "__init__"


def test_common_argument_docs_name_only_existing_arguments(made: Any) -> None:
    taken = {argument for _, method in made.public(ratchet.Client) for argument in made.arguments(method)}
    assert made.COMMON.keys() <= taken


def test_every_task_part_is_documented_and_in_reference_example(made: Any) -> None:
    for cls in (ratchet.Parts, ratchet.TaskContext):
        assert [field for field in cls.__dataclass_fields__ if f"``{field}" not in (cls.__doc__ or "")] == []
    whole = (ROOT / "examples" / "reference" / "classifier.py").read_text()
    optional = re.findall(r"^    - ``(\w+)\(", ratchet.Task.__doc__ or "", re.MULTILINE)
    assert len(optional) == 5 and all(f"    def {name}(" in whole for name in (*optional, "build", "loss"))


def test_page_generator_refuses_method_without_example(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratchet.Session, "undreamt", lambda self, deep: None, raising=False)
    with pytest.raises(LookupError, match=r"no example of Session\.undreamt: call session\.undreamt in"):
        made.page()
