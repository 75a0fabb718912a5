"""What messages and pages advise exists: commands, options, keys of the spec, variables, pages, extras, targets of make.

What is followed for real: ``tests/e2e/test_hints.py`` and ``test_advice.py``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from ratchet_contract import env_vars
from ratchet_contract.spec.job import JobSpec
from ratchet_service.isolation.sandbox import MARKER_VARIABLE
from tests.support import command_lines
from tests.support.command_lines import ROOT, commands, parse, source_files, string_literals
from tests.support.docs import PAGES, anchors

Told = list[tuple[Path, int, str]]
TORCHRUN = {"--nproc-per-node", "--local-ranks-filter", "--max-restarts"}


@cache  # seconds, which every worker would spend that only collects
def told_by_messages() -> Told:
    return [(path, line, text) for path in source_files() for line, text in string_literals(path)]


def told_by_pages() -> Told:
    return [(page, 0, page.read_text()) for page in PAGES]


def test_message_scan_extracts_commands_and_parse_rejects_wrong_ones(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""`ratchet no`"""\ndef f(job):\n    return f"then `ratchet get {job}`; all: ratchet list --all (x)"\n'
    )
    [(line, text)] = string_literals(module)
    assert (line, commands(text)) == (3, ["ratchet get 1", "ratchet list --all"])
    for good in ("ratchet resume JOB --world N", "ratchet token list", "ratchet quota set OWNER --jobs 8"):
        parse(good)
    for bad in (
        "ratchet resume --world 2",
        "ratchet resume JOB --wrld 2",
        "ratchet restart JOB",
        "ratchet token list JOB",
    ):
        with pytest.raises(AssertionError):
            parse(bad)


def test_commands_in_messages_are_valid() -> None:
    wrong, seen = [], 0
    for path, line, text in told_by_messages():
        for command in commands(text):
            seen += 1
            try:
                parse(command)
            except (AssertionError, ValueError) as error:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {error}")
    assert wrong == [] and seen > 80


def test_options_in_messages_exist() -> None:
    known = command_lines.options() | TORCHRUN
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {option}"
        for path, line, text in told_by_messages()
        for quoted in re.findall(r"`(--[^`]*)`", text)
        for option in re.findall(r"--[a-z][a-z-]*", quoted)
        if option not in known
    ]
    assert wrong == []


def models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models(part)]


def has(model: type[BaseModel], path: list[str]) -> bool:
    """Does the spec have such a key? Of a part that is a mapping, or of any shape, every key."""
    field = model.model_fields.get(path[0])
    if field is None:
        return False
    inner = models(field.annotation)
    return len(path) == 1 or not inner or any(has(one, path[1:]) for one in inner)


def spec_keys(text: str) -> list[str]:
    """``policy.stop_grace`` and the like; not what is an attribute, a file, or a module of Python."""
    parts = "|".join(name for name, field in JobSpec.model_fields.items() if models(field.annotation))
    found = re.findall(rf"(?<![\w./:\"'{{-])(?:{parts})(?:\.[a-z]\w*)+(?![\w(/.:])", text)
    return [key.removesuffix("1") for key in found if not key.endswith((".py", ".pt", ".tar", ".json", ".yaml"))]


NOT_THE_SPEC = {"hook.state_version", "environment.log"}
"""Of a manifest, and a file. Pages about Python name attributes of objects so."""


@pytest.mark.parametrize("told_by", [told_by_messages, told_by_pages])
def test_spec_keys_in_messages_and_pages_exist(told_by: Callable[[], Told]) -> None:
    named = {
        (path.name, line, key)
        for path, line, text in told_by()
        for key in spec_keys(text)
        if not path.name.startswith("python")
    }
    assert len(named) > 60
    wrong = [one for one in named if one[2] not in NOT_THE_SPEC and not has(JobSpec, one[2].split("."))]
    assert wrong == []


@pytest.mark.parametrize("told_by", [told_by_messages, told_by_pages])
def test_extras_variables_pages_and_make_targets_in_texts_exist(told_by: Callable[[], Told]) -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {MARKER_VARIABLE, *(value for value in vars(env_vars).values() if isinstance(value, str))}
    wrong, seen = [], 0
    for path, line, text in told_by():
        named = [x for part in re.findall(r"ratchet-train\[([a-z0-9,]+)\]", text) for x in part.split(",")]
        wrong += [(path.name, line, extra) for extra in named if extra not in extras | {"1"}]
        made = re.findall(r"`make ([a-z-]+)", text)
        wrong += [(path.name, line, f"make {target}") for target in made if target not in targets]
        variables = re.findall(r"\bRATCHET_[A-Z_]+[A-Z]\b(?!_)", text) if told_by is told_by_messages else []
        wrong += [(path.name, line, name) for name in variables if name not in known]
        pages = re.findall(r"(?<![\w/])((?:docs|examples|deploy)/[\w/-]+\.(?:md|yaml|py|ipynb))(?:#([\w-]+))?", text)
        for page, anchor in pages:
            if not (ROOT / page).exists() or (anchor and anchor not in anchors(ROOT / page)):
                wrong.append((path.name, line, f"{page}#{anchor}"))
        seen += len(named) + len(made) + len(variables) + len(pages)
    assert wrong == [] and seen > 20


def test_commands_in_deploy_pages_are_valid() -> None:
    found = [command for path in (ROOT / "deploy").rglob("*.md") for command in commands(path.read_text())]
    assert len(found) > 5
    for command in found:
        parse(command)
