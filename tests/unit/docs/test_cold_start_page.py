"""Reasons of a cold start, as the code gives them and as their page explains them."""

from __future__ import annotations

import ast

import pytest

from tests.support.docs import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## A cold start\n")[2]
SOURCES = {
    "service/ratchet_service/launchers/local/standby.py": {
        "kind_of", "take", "_why_none", "_memory_short", "_note", "_note_end",
    },
    "worker/ratchet_worker/agent/fork_starter.py": {"_misfit"},
    "worker/ratchet_worker/rank/fork_server.py": {"_wait_for_plans"},
}  # fmt: skip


def reasons(path: str) -> set[str]:
    """The words of the texts that the file's functions return, or assign to ``why``, without what is filled in."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in SOURCES[path]]
    assert {one.name for one in functions} == SOURCES[path]
    given = [
        node.value
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Return) or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "why")
    ]
    texts = [part.value for value in given if value for part in ast.walk(value) if isinstance(part, ast.Constant)]
    return {text.strip() for text in texts if isinstance(text, str) and " " in text.strip()}


@pytest.mark.parametrize("path", SOURCES)
def test_every_reason_of_a_cold_start_is_explained(path: str) -> None:
    found = reasons(path)
    assert len(found) > 2 and [text for text in found if text not in PAGE] == []
