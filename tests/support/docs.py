"""The documentation's pages taken apart: blocks of code, links, headings; and the runner of their Python blocks.

``python -m tests.support.docs`` executes, in this one process, what standard input tells (JSON): per page a list of ``[line,
source]``, and the id of a finished job that the blocks call ``job_id``; then the examples in the client's docstrings.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: \S.*?-->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block. ``not_run``: the comment before it says why it is no test."""

    language: str
    text: str
    line: int
    not_run: bool


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        indent, language, body = found.groups()
        lines = "".join(line.removeprefix(indent) for line in body.splitlines(keepends=True))
        before = text[: found.start()]
        yield Block(language, lines, before.count("\n") + 2, _NOT_RUN.search(before) is not None)


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What links may name after ``#``: GitHub's form of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).strip().lower() for h in headings]
    return {re.sub(r"[^\w\- ]", "", h).replace(" ", "-") for h in plain}


def load_page_generator(page: str) -> Any:
    """The module ``docs/make_<page>.py``."""
    found = spec_from_file_location(f"make_{page}", ROOT / "docs" / f"make_{page}.py")
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def run_blocks(pages: dict[str, list[tuple[int, str]]], job_id: str) -> None:
    for page, found in pages.items():
        scope: dict[str, Any] = {"__name__": "__main__", "job_id": job_id}
        for line, source in found:
            exec(compile("\n" * (line - 1) + source, page, "exec"), scope)
    _docstrings(job_id)


def _docstrings(job_id: str) -> None:
    import doctest

    import ratchet
    from ratchet_client.resources import client, follow, job, tokens

    tried = 0
    with ratchet.Client() as connected, tempfile.TemporaryDirectory() as directory:
        scope = {"client": connected, "ratchet": ratchet, "job_id": job_id, "directory": Path(directory)}
        for module in (tokens, client, follow, job):
            result = doctest.testmod(module, extraglobs=scope | {"key": str(uuid.uuid4())}, raise_on_error=False)
            tried += result.attempted
            if result.failed:
                raise SystemExit(f"{result.failed} examples in the docstrings of {module.__name__} failed")
    print(f"{tried} examples in docstrings")


if __name__ == "__main__":
    run_blocks(*json.load(sys.stdin))
