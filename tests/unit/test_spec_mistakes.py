"""Every mistake of a spec is told at once, and none that only follows from another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ratchet_contract.errors import SpecError
from ratchet_contract.paths import HomePaths
from ratchet_contract.spec import JobSpec
from ratchet_contract.spec_parse import examine_spec
from ratchet_service.launchers.table import load
from ratchet_service.machine import Machine
from ratchet_service.roots import Roots
from ratchet_service.submission import LocalSubmission
from ratchet_service.usecases import submit

ENTANGLED: dict[str, Any] = {
    "name": "entangled",
    "script": ["train.py"],
    "env": {"OMP_NUM_THREADS": "2", "TOKEN": "x"},
    "secret_env": ["TOKEN"],
    "world": {"ranks_per_node": 4, "device": "cpu"},
    "resources": {"cpus_per_rank": 2, "memory": "4Gi"},
    "hook": {"name": "post_localSGD", "subgroup_size": 4},
    "trial": {"end_at": 10, "faults": [{"attempt": 1, "rank": 3, "step": 5, "kind": "preempt"}]},
    "checkpoint": {"every_steps": 5},
}
"""What each key asks for holds only with the others: any of them at its default would bring faults elsewhere."""

OUTSIDE = {"path": "of the directory that code may come from"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """The mistakes of a spec as ``pointer code``, found by a service that has the directory ``project`` and may read no other."""
    outside = tmp_path_factory.mktemp("outside")
    project = outside / "project"
    project.mkdir()
    (project / "train.py").write_text("from ratchet_worker.session import Session\n")
    (outside / "private.py").write_text("a private line that is no Python\n")
    home = HomePaths(outside / "home")
    home.home.mkdir()
    roots = Roots(home.home, (project,))
    ports = LocalSubmission(home, Machine((), 8), load(home, None), roots=roots)

    def ask(**changes: Any) -> list[str]:
        data = {**ENTANGLED, "code": {"path": str(project)}, **changes}
        if data["code"] == OUTSIDE:
            data["code"] = {"path": str(outside)}
        try:
            submit.check({key: value for key, value in data.items() if value is not ...}, ports)
        except SpecError as error:
            return [f"{e.pointer} {e.code}" for e in error.errors]
        return []

    return ask


def test_the_spec_of_these_tests_has_no_mistake(told: Callable[..., list[str]]) -> None:
    assert told() == []


@pytest.mark.parametrize("wrong", [[[]], {"?": 1}, -1.5], ids=str)
@pytest.mark.parametrize("key", sorted(JobSpec.model_fields))
def test_a_mistake_in_one_key_brings_no_message_of_another(
    told: Callable[..., list[str]], key: str, wrong: Any
) -> None:
    found = told(**{key: wrong})
    assert found and all(f"{line} ".startswith((f"/{key}/", f"/{key} ")) for line in found), found


def test_what_can_be_told_of_the_machine_is_told_beside_mistakes_of_the_keys(told: Callable[..., list[str]]) -> None:
    found = told(name="My Job", hook="powerSDG", python="/nowhere/bin/python", script=["trian.py"], lables={})
    assert set(found) == {
        "/name string-pattern-mismatch",
        "/hook/name unknown-hook",
        "/python python-not-found",
        "/script/0 script-not-found",
        "/lables unknown-key",
    }


def test_neither_a_task_nor_a_script_is_told_beside_the_others(told: Callable[..., list[str]]) -> None:
    assert set(told(script=..., name="My Job", seed=-1)) == {
        "/name string-pattern-mismatch",
        "/seed greater-than-equal",
        " value-error",
    }
    assert set(told(secret_env=["ABSENT"], script=...)) == {" value-error"}
    assert len(told(secret_env=["ABSENT"], script=...)) == 2


def test_a_key_that_may_be_another_misspelt_is_not_taken_to_be_absent(told: Callable[..., list[str]]) -> None:
    assert told(world=..., wrld=ENTANGLED["world"]) == ["/wrld unknown-key"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"script": ["../private.py"]}, ["/script/0 invalid-script"]),
        ({"code": OUTSIDE, "script": ["private.py"]}, ["/code/path path-not-allowed"]),
    ],
)
def test_nothing_is_read_that_a_mistake_forbids(
    told: Callable[..., list[str]], changes: dict[str, Any], expected: list[str]
) -> None:
    assert told(**changes, name="My Job") == ["/name string-pattern-mismatch", *expected]


@pytest.mark.parametrize("data", [{}, {5: 6}, {"task": 5, "script": 6, "secret_env": ["A"]}, {"hook": []}, {"": ""}])
def test_odd_mappings_are_refused_with_each_mistake_once(data: Any) -> None:
    problems = examine_spec(data).problems
    assert problems and len({(p.pointer, p.detail) for p in problems}) == len(problems)
