"""Every event of a job's history is explained on a page, under the name that ``ratchet events`` shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import get_args

from ratchet_contract.phases import Event, EventType
from ratchet_hooks.ddp.numeric_warnings import Code
from tests.support.docs import PAGES, ROOT


def notes() -> Iterator[str]:
    """Yield the types of the notes that the worker's code reports, and those that the retention of checkpoints returns."""
    for path in sorted((ROOT / "worker").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="note"), args=[type_, *_]):
                    options = [type_.body, type_.orelse] if isinstance(type_, ast.IfExp) else [type_]
                    yield from (str(one.value) for one in options if isinstance(one, ast.Constant))
    retention = (ROOT / "store/ratchet_store/retention/attempt_retention.py").read_text()
    for node in ast.walk(ast.parse(retention)):
        match node:
            case ast.Call(func=ast.Attribute(attr="append"), args=[ast.Tuple(elts=[ast.Constant() as type_, _])]):
                yield str(type_.value)


def test_events_of_ranks_and_agents_are_explained_on_a_page() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    found = {*notes(), *(f"hook-{code}" for code in get_args(Code))}
    assert len(found) > 25
    assert sorted(one for one in found if f"`note.{one}`" not in pages) == []


def test_tables_of_troubleshooting_have_all_events_of_the_service_and_no_others() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| event \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    named = [
        name
        for rows in tables
        for cell in re.findall(r"^\| (.*?) \|", rows, re.M)
        for name in re.findall("`(.*?)`", cell)
    ]
    not_stored = {Event.PATCH, Event.DELETE, Event.FORK}  # the history has ``patched`` and ``forked`` for two of them
    assert {name for name in named if not name.startswith("note.")} == {*EventType, *Event} - not_stored
