"""``environment`` at submission: which requirements are refused, and what the job stores of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.code.choice import allow_all
from ratchet_contract.errors import SpecError
from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.preflight import environment
from ratchet_service.preflight.environment import with_lines
from ratchet_service.preflight.report import Report
from ratchet_service.preflight.resolve import resolve
from ratchet_service.scheduling.machine import Machine

BASE: dict[str, Any] = {"name": "a", "script": ["train.py"], "world": {"device": "cpu"}}


def spec_of(folder: Path, requirements: Any, **more: Any) -> JobSpec:
    given = BASE | {"code": {"path": str(folder)}, "environment": {"requirements": requirements}} | more
    return parse_spec(given)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--index-url https://example.com", "PIP_INDEX_URL"),
        ("-e .", "code.path is on the import path already"),
        ("./package", "NAME @ file://"),
        ("-c versions.txt", "write the versions into the requirements"),
        ("https://example.com/a.whl", "NAME @ ADDRESS"),
        ("numpy 2.0", "not a requirement such as NAME==VERSION"),
        ("numpy @ ./here", "not a requirement such as NAME==VERSION"),
    ],
)
def test_requirements_that_cannot_work_are_refused_with_line_and_cure(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(SpecError, match=r"/environment/requirements") as caught:
        spec_of(tmp_path, ["numpy", line])
    assert line in caught.value.detail and words in caught.value.detail
    (tmp_path / "requirements.txt").write_text(f"# first\nnumpy\n{line}\n")
    with pytest.raises(SpecError, match=r"requirements\.txt, line 3: ") as caught:
        with_lines(spec_of(tmp_path, "requirements.txt"), tmp_path)
    assert line in caught.value.detail and words in caught.value.detail


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "must be the name of a file"),
        ({"numpy": 2}, "must be the name of a file"),
        ("/etc/passwd", "below code.path"),
        ("../other.txt", "below code.path"),
    ],
)
def test_value_that_is_neither_file_nor_lines_is_refused(tmp_path: Path, given: Any, words: str) -> None:
    with pytest.raises(SpecError, match=r"/environment/requirements") as caught:
        spec_of(tmp_path, given)
    assert words in caught.value.detail


def test_environment_is_refused_where_the_image_is_the_environment(tmp_path: Path) -> None:
    for more in ({"launcher": {"kind": "kubernetes"}}, {"launcher": {"kind": "slurm"}, "image": "a:1"}):
        with pytest.raises(SpecError, match="install the packages in the image"):
            spec_of(tmp_path, ["numpy"], **more)
    with pytest.raises(SpecError, match="write the lines themselves"):
        spec_of(tmp_path, "requirements.txt", code={"path": "/somewhere", "source": "nodes"})


def test_file_of_requirements_is_read_with_the_files_that_it_includes(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "requirements.txt").write_text("-r more/base.txt\n\ntimm  == 1.0.9 # ours\n")
    (tmp_path / "more/base.txt").write_text("--requirement=common.txt\nnumpy>=2; python_version > '3'\n")
    (tmp_path / "more/common.txt").write_text("einops \\\n  --hash=sha256:ab12\n")
    found = with_lines(spec_of(tmp_path, "requirements.txt"), tmp_path)
    assert found.environment is not None
    assert found.environment.lines == ["einops --hash=sha256:ab12", "numpy>=2; python_version > '3'", "timm == 1.0.9"]
    assert found == JobSpec.model_validate(found.model_dump(mode="json"))
    for name, text, words in (
        ("a.txt", "-r a.txt\n", "includes itself"),
        ("b.txt", "-r ../outside.txt\n", "line 1: '../outside.txt'"),
        ("c.txt", "# nothing\n", "has no requirements"),
        ("d.txt", "-r absent.txt\n", "absent.txt of the code cannot be read"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(SpecError, match=words):
            with_lines(spec_of(tmp_path, name), tmp_path)


def test_file_outside_of_the_allowed_directories_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "secret").write_text("private text\n")
    (tmp_path / "code/requirements.txt").symlink_to(tmp_path / "secret")
    spec = spec_of(tmp_path / "code", "requirements.txt")
    with pytest.raises(SpecError, match="leads out of the directories") as caught:
        with_lines(spec, tmp_path / "code", lambda path: path.is_relative_to(tmp_path / "code"))
    assert "private" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("torch==2.5.1", "torch-version"),
        ("torch<2.9", "torch-version"),
        ("torch~=2.7.0", "torch-version"),
        ("torch>=2.5", None),
        ("torch~=2.5", None),
        ("torch==2.11.0", None),
        ("ratchet-train[worker]==99", "ratchet-version"),
        ("Ratchet_Train[worker]", None),
    ],
)
def test_versions_that_cannot_run_the_job_are_refused(tmp_path: Path, line: str, code: str | None) -> None:
    report = Report()
    environment.check(spec_of(tmp_path, [line]), tmp_path, report, allow_all)
    assert [problem.code for problem in report.problems] == ([code] if code else [])


def test_import_of_a_required_package_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import some_package\nimport comes_with_it\n")
    given = {**BASE, "code": {"path": str(tmp_path)}, "resources": {"cpus_per_rank": 1}}
    _, _, problems = resolve(parse_spec(given), Machine((), 4))
    assert [problem.code for problem in problems] == ["package-missing"]
    given["environment"] = {"requirements": ["Some.Package>=1"]}
    _, warnings, problems = resolve(parse_spec(given), Machine((), 4))
    (warning,) = [warning for warning in warnings if warning.code == "package-missing"]
    assert problems == [] and "comes_with_it" in warning.detail and "some_package" not in warning.detail


def test_spec_without_the_key_keeps_its_digest(tmp_path: Path) -> None:
    plain = parse_spec({**BASE, "code": {"path": str(tmp_path)}})
    assert "environment" not in plain.canonical() and plain.digest() != spec_of(tmp_path, ["numpy"]).digest()
