"""The verdicts as a table and as JSON, written again after every row. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.gpu.rows import ROWS
from tests.gpu.runner import Result, as_json

_CELL: Final = 1500
"""Characters of a cell."""


def write(out: Path, facts: Mapping[str, Any], results: Sequence[Result]) -> None:
    """``out/table.md``, ``out/table.json`` and, of the newest result, ``out/rows/NAME.json``."""
    (out / "rows").mkdir(parents=True, exist_ok=True)
    if results:
        _put(out / "rows" / f"{results[-1].row}.json", json.dumps(as_json(results[-1]), indent=1))
    everything = {"facts": dict(facts), "rows": [as_json(result) for result in results]}
    _put(out / "table.json", json.dumps(everything, indent=1))
    _put(out / "table.md", markdown(facts, results))


def markdown(facts: Mapping[str, Any], results: Sequence[Result]) -> str:
    lines = ["# make gpu", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| row | verdict | seconds | what was seen |", "|---|---|---|---|"]
    lines += [f"| {r.row} | {r.verdict} | {r.seconds:.0f} | {_cell(r.seen)} |" for r in results]
    for result in results:
        if result.parts:
            lines += [
                "",
                f"## {result.row}: {ROWS[result.row].about}" if result.row in ROWS else f"## {result.row}",
                "",
            ]
            lines += ["| part | verdict | what was seen |", "|---|---|---|"]
            lines += [f"| {part.name} | {part.verdict} | {_cell(part.seen)} |" for part in result.parts]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """In one line. Of a long text both ends: a traceback tells its error last."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= _CELL else f"{line[: _CELL // 3]} ... {line[-_CELL * 2 // 3 :]}"


def _put(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.rename(path)
