"""Every mistake of a spec is told at once, and none that only follows from another one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.errors import SpecError
from ratchet_contract.paths import HomePaths
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.parse import examine_spec, parse_spec
from ratchet_service.launchers.registry import load
from ratchet_service.preflight.paths import Roots
from ratchet_service.scheduling.machine import Machine
from ratchet_service.submission.local_submission import LocalSubmission
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


def test_base_spec_has_no_mistakes(told: Callable[..., list[str]]) -> None:
    assert told() == []


@pytest.mark.parametrize("wrong", [[[]], {"?": 1}, -1.5], ids=str)
@pytest.mark.parametrize("key", sorted(JobSpec.model_fields))
def test_a_mistake_in_one_key_brings_no_message_of_another(
    told: Callable[..., list[str]], key: str, wrong: Any
) -> None:
    found = told(**{key: wrong})
    assert found and all(f"{line} ".startswith((f"/{key}/", f"/{key} ")) for line in found), found


def test_machine_checks_are_reported_together_with_key_mistakes(told: Callable[..., list[str]]) -> None:
    found = told(name="My Job", hook="powerSDG", python="/nowhere/bin/python", script=["trian.py"], lables={})
    assert set(found) == {
        "/name string-pattern-mismatch",
        "/hook/name unknown-hook",
        "/python python-not-found",
        "/script/0 script-not-found",
        "/lables unknown-key",
    }


def test_code_and_script_paths_are_checked_despite_other_mistakes(
    told: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert told(code={"path": str(tmp_path / "absent"), "includes": ["data"]}) == [
        "/code/path path-not-allowed",
        "/code/includes unknown-key",
    ]
    spec = {
        "name": "a",
        "script": ["trian.py", "--lr", 0.1, 3],
        "code": {"includes": [5], "path": str(tmp_path / "absent")},
    }
    (tmp_path / "there").mkdir()
    home = HomePaths(tmp_path)
    ports = LocalSubmission(home, Machine((), 8), load(home, None))

    def found(path: str) -> list[str]:
        with pytest.raises(SpecError) as caught:
            submit.check({**spec, "code": {**spec["code"], "path": str(tmp_path / path)}}, ports)
        return [f"{e.pointer} {e.code}" for e in caught.value.errors]

    arguments = ["/script/2 string-type", "/script/3 string-type", "/code/includes unknown-key"]
    assert found("there") == ["/script/0 script-not-found", *arguments]
    assert found("absent") == [*arguments, "/code/path not-a-directory"]


def test_spec_mistakes_are_reported_in_file_order(told: Callable[..., list[str]]) -> None:
    wrong = {
        "hook": "powerSDG",
        "seed": -1,
        "world": {"nodes": 0, "device": "gpu", "ranks_per_node": 0},
        "lables": {},
        "name": "B",
    }
    with pytest.raises(SpecError) as caught:
        parse_spec({**wrong, "task": {"args": {}}})
    assert [e.pointer for e in caught.value.errors] == [
        "/hook/name", "/seed", "/world/nodes", "/world/device", "/world/ranks_per_node", "/lables", "/name", "/task/entrypoint",
    ]  # fmt: skip
    found = told(python="/nowhere/bin/python", name="My Job", lables={}, script=["trian.py"])
    assert [line.split()[0] for line in found] == ["/name", "/script/0", "/python", "/lables"], (
        "that the machine tells, too"
    )


def test_missing_task_and_script_is_reported_with_other_mistakes(told: Callable[..., list[str]]) -> None:
    assert set(told(script=..., name="My Job", seed=-1)) == {
        "/name string-pattern-mismatch",
        "/seed greater-than-equal",
        " value-error",
    }
    assert set(told(secret_env=["ABSENT"], script=...)) == {" value-error"}
    assert len(told(secret_env=["ABSENT"], script=...)) == 2
    with pytest.raises(SpecError, match="'NONE', 'ABSENT'"):
        parse_spec({**ENTANGLED, "code": {"path": "/x"}, "secret_env": ["NONE", "TOKEN", "ABSENT"]})


def test_misspelt_key_is_not_also_reported_as_missing(told: Callable[..., list[str]]) -> None:
    assert told(world=..., wrld=ENTANGLED["world"]) == ["/wrld unknown-key"]


BESIDE: dict[str, list[tuple[Any, str]]] = {
    "env": [({"A B": "1"}, "A B value-error"), ({"RANK": "1"}, "RANK value-error"), ({"A": []}, "A string-type"),
            ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS invalid-value")],
    "secrets": [({"ABSENT": {"from_env": "NOT_SET_ANYWHERE"}}, "ABSENT secret-missing"), ({"BOTH": {}}, "BOTH value-error"),
                ({"TOKEN": {"from_env": "PATH"}}, "TOKEN duplicate-variable"),
                ({"RANK": {"from_env": "PATH"}}, "RANK value-error"),
                ({"ODD": {"from_evn": "PATH"}}, "ODD/from_evn unknown-key")],
    "nccl": [({"A": "1"}, "A value-error"), ({"B": "1"}, "B value-error"), ({"NCCL_X": []}, "NCCL_X string-type")],
    "labels": [({"-": "a"}, "- value-error"), ({"+": "a"}, "+ value-error"), ({"a": "x" * 300}, "a value-error")],
    "hook": [({"matrix_aproximation_rank": 2}, "matrix_aproximation_rank unknown-key"),
             ({"start_powerSGD_iter": 1}, " value-error"),
             ({"wrapper": "fp8"}, "wrapper unknown-wrapper"), ({"random_seed": -1}, "random_seed greater-than-equal")],
    "ddp": [({"static_graph": True, "find_unused_parameters": True}, "find_unused_parameters ddp-conflict"),
            ({"bucket_cap_mb": 0}, "bucket_cap_mb greater-than"), ({"bakend": "gloo"}, "bakend unknown-key")],
    "checkpoint": [({"every_steps": 0}, "every_steps value-error"), ({"kep_last": 3}, "kep_last unknown-key"),
                   ({"uri": "s3://b?c"}, "uri value-error")],
    "policy": [({"exit_codes": [{"codes": [1000], "action": "fail"}]}, "exit_codes/0/codes/0 exit-code-reserved"),
               ({"max_failures": -1}, "max_failures greater-than-equal"), ({"tmeout": 5}, "tmeout unknown-key")],
    "trial": [({"end_at": 0}, "end_at"), ({"fault": []}, "fault unknown-key")],
}  # fmt: skip
"""Entries of one mapping, each with a mistake of its own, and how that is told."""


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [(key, *pair) for key, entries in BESIDE.items() for pair in itertools.combinations(entries, 2)],
)
def test_two_mistakes_in_one_mapping_are_both_reported(
    told: Callable[..., list[str]], key: str, one: tuple[Any, str], other: tuple[Any, str]
) -> None:
    of = {"hook": {"name": "powerSGD"}, "env": {"TOKEN": "x"}}.get(key, {})
    found = told(**{key: {**of, **one[0], **other[0]}})
    assert all(any(line.startswith(f"/{key}/{text}".replace("/ ", " ")) for line in found) for _, text in (one, other))
    assert {line.split()[0].split("/")[1] for line in found} == {key}


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ({"use_error_feedbak": False, "warm_start": False}, ["/hook/use_error_feedbak unknown-key"]),
        ({"warm_start": "on and off", "use_error_feedback": False}, ["/hook/warm_start bool-parsing"]),
        ({"feedback_of_errors": False, "warm_start": False}, ["/hook/feedback_of_errors unknown-key"]),
        (
            {"feedback_of_errors": False, "warm_start": True, "use_error_feedback": False},
            ["/hook value-error", "/hook/feedback_of_errors unknown-key"],
        ),
    ],
)
def test_cross_key_rule_is_skipped_when_a_key_is_invalid(
    told: Callable[..., list[str]], hook: dict[str, Any], expected: list[str]
) -> None:
    assert told(hook={"name": "powerSGD", "start_powerSGD_iter": 1, **hook}) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"script": ["../private.py"]}, ["/script/0 invalid-script"]),
        ({"code": OUTSIDE, "script": ["private.py"]}, ["/code/path path-not-allowed"]),
    ],
)
def test_invalid_paths_are_not_read(
    told: Callable[..., list[str]], changes: dict[str, Any], expected: list[str]
) -> None:
    assert told(**changes, name="My Job") == ["/name string-pattern-mismatch", *expected]


@pytest.mark.parametrize("data", [{}, {5: 6}, {"task": 5, "script": 6, "secret_env": ["A"]}, {"hook": []}, {"": ""}])
def test_odd_mappings_report_each_mistake_once(data: Any) -> None:
    problems = examine_spec(data).problems
    assert problems and len({(p.pointer, p.detail) for p in problems}) == len(problems)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"script": ["train.py", "--lr", 0.1]}, '/script/2: must be text, not 0.1: write it in quotes, "0.1"'),
        ({"world": {"ranks_per_node": "high"}}, "/world/ranks_per_node: must be a whole number, not 'high'"),
        ({"world": {"device": "gpu"}}, "not 'gpu'; did you mean 'cuda'?"),
        ({"ttl": "soon"}, "like 90, '30s' or '2h', not 'soon'"),
        ({"labels": ["a"]}, "/labels: must be a mapping, not ['a']: write labels: {team: vision}"),
        (
            {"hook": {"nam": "powerSGD"}},
            "/hook: has no name, but 'nam'; did you mean 'name'? Write hook: {name: powerSGD}",
        ),
        ({"hook": {}}, "/hook: has no name: write hook: {name: powerSGD}"),
        ({"hook": {"name": "powerSGD", "use_error_feedback": "perhaps"}}, "must be true or false, not 'perhaps'"),
    ],
)
def test_common_mistake_message_shows_given_and_correct_value(changes: dict[str, Any], says: str) -> None:
    (problem,) = examine_spec({**ENTANGLED, "code": {"path": "/x"}, **changes}).problems
    assert says in f"{problem.pointer}: {problem.detail}" and len(problem.detail) < 250
