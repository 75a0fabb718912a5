"""The table of promises (``tests/promises.md``) names pages and tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.support.docs import ROOT

TABLE = ROOT / "tests" / "promises.md"
ROW = re.compile(r"^\| (?P<promise>.+) \| (?P<also>[\w, -]*) \| (?P<tests>`.+`) \|$")


@cache
def _tests_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_promise_names_pages_and_tests_that_exist() -> None:
    lines = TABLE.read_text().splitlines()
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"README"}
    headings = {line.removeprefix("## ") for line in lines if line.startswith("## ")}
    rows = [ROW.match(line) for line in lines if line.startswith("| ") and not line.startswith("| promise |")]
    assert len(rows) > 600 and all(rows), "a row has another form"
    also = {page for row in rows if row for page in row["also"].split(", ") if page}
    assert headings | also <= pages
    wrong = []
    for row in rows:
        assert row is not None
        for name in re.findall(r"`([^`]+)`", row["tests"]):
            path, _, test = name.partition("::")
            file = ROOT / "tests" / path
            if not file.is_file() or (test and test not in _tests_of(file)):
                wrong.append(f"{row['promise']}: {name}")
    assert not wrong, "\n".join(wrong)
