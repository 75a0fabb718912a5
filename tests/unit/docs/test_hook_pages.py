"""``docs/hooks.md`` against the registry and the code: each hook has its section, and what that says of it is so."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import get_args

import pytest
import yaml
from pydantic import TypeAdapter

from ratchet_contract.spec.job import DdpSpec, JobSpec, WorldSpec
from ratchet_contract.spec.parse import parse_spec
from ratchet_hooks.specs.memory_estimate import hook_memory
from ratchet_hooks.specs.registry import HOOKS
from ratchet_hooks.summary import HookPhase
from tests.support.docs import ROOT

PAGE = (ROOT / "docs" / "hooks.md").read_text()
ROWS = ["computes", "keeps", "memory", "bytes", "phases", "warnings"]
LINKS = (
    "docs.pytorch.org/docs/stable/ddp_comm_hooks.html", "lightning.ai/docs/pytorch/stable/advanced/ddp_optimizations.html",
    "arxiv.org/abs/1905.13727", "arxiv.org/abs/1808.07217", "arxiv.org/abs/2010.12998",
    "observablehq.com/@tvogels/powersgd-benchmark",
)  # fmt: skip


def section(name: str) -> str:
    """The text below the heading that names the hook."""
    for part in PAGE.split("\n## ")[1:]:
        heading = part.partition("\n")[0]
        if name in heading.split(", ") or (name == "custom" and heading == "Your own hook"):
            return part
    raise AssertionError(f"docs/hooks.md has no section of {name}")


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_section_matches_registry(name: str) -> None:
    text = section(name)
    rows = dict(re.findall(r"^\| (\w+) \| (.+) \|$", text, re.MULTILINE))
    assert [row for row in rows if row in ROWS] == ROWS
    for warning in HOOKS[name].warnings:
        assert warning in rows["warnings"]
    assert HOOKS[name].warnings or rows["warnings"] == "none"
    assert set(re.findall(r"`([a-z-]+)`", rows["phases"])) == phases(name)
    examples = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    task = {"name": "page", "task": {"entrypoint": "m:Task"}, "world": {"ranks_per_node": 8}}
    specs = [parse_spec({**task, **example}) for example in examples if "hook" in example]
    found = [spec for spec in specs if spec.hook.name == name]
    assert found, f"no example of {name}"
    kept = hook_memory(found[0].hook, [(64, 64)])
    assert (kept == 0) == rows["memory"].startswith("none")
    assert HOOKS[name].stateful != rows["keeps"].startswith("nothing")


def phases(name: str) -> set[str]:
    """The phases that the class of the hook reports, read in its source."""
    module, _, attribute = str(HOOKS[name].builder).partition(":")
    classes = [c for c in getattr(import_module(module), attribute).__mro__ if c.__module__.startswith("ratchet_hooks")]
    report = next(c for c in classes if "report" in vars(c)).report
    return {word for word in get_args(HookPhase) if f'"{word}"' in inspect.getsource(report)} or {"steady"}


@pytest.mark.parametrize("link", LINKS)
def test_hook_page_links_sources(link: str) -> None:
    assert f"(https://{link})" in PAGE


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_in_table_readme_and_changelog(name: str) -> None:
    table = PAGE.partition("## Choosing a hook")[2].partition("\n## ")[0]
    assert re.search(rf"^\| [^|]*`{name}`", table, re.MULTILINE)
    assert f"`{name}`" in (ROOT / "README.md").read_text().partition("## What is here")[2].partition("\n## ")[0]
    assert f"`{name}`" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (TypeAdapter(HOOKS["powerSGD"].spec).json_schema(), "memory of the size of the gradients"),
        (TypeAdapter(HOOKS["powerSGD"].spec).json_schema(), "native AMP with float32 parameters, not Apex"),
        (TypeAdapter(HOOKS["batched_powerSGD"].spec).json_schema(), "native AMP"),
        (TypeAdapter(HOOKS["noop"].spec).json_schema(), "wrong results"),
        (TypeAdapter(HOOKS["post_localSGD"].spec).json_schema(), "1 sends as much as all-reduce"),
        (WorldSpec.model_json_schema(), "One device per rank"),
        (DdpSpec.model_json_schema(), "use zero_grad()"),
        (JobSpec.model_json_schema(), "AWS and GCP"),
        (JobSpec.model_json_schema()["properties"]["hook"], "experimental in torch"),
    ],
)
def test_hook_schema_contains_documented_warnings(schema: dict[str, object], words: str) -> None:
    assert words in str(schema)
