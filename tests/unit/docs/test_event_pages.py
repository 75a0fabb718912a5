"""Every event that a rank or an agent reports is explained on a page, under the name that ``ratchet events`` shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import get_args

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
    assert "`message-dropped`" in pages
