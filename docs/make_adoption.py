"""Puts the differences between scripts of the examples into the page that shows them: ``python docs/make_adoption.py``. A test
compares."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

PAGE = Path(__file__).with_name("adoption.md")
EXAMPLES = Path(__file__).parents[1] / "examples"
_BLOCK = re.compile(r"<!-- diff (\S+) (\S+) -->\n```diff\n.*?```\n", re.DOTALL)


def diff(old: str, new: str) -> str:
    """Of two forms in ``examples/adoption``, or two scripts of examples (``DIRECTORY/NAME``). Unified, one line of context."""
    names = [f"{one}.py" if "/" in one else f"{one}/train.py" for one in (old, new)]
    texts = [
        (EXAMPLES / ("" if "/" in one else "adoption") / name).read_text().splitlines(keepends=True)
        for one, name in zip((old, new), names, strict=True)
    ]
    return "".join(difflib.unified_diff(*texts, *names, n=1))


def page(text: str) -> str:
    """``text`` with every block ``<!-- diff OLD NEW -->`` replaced by the current diff."""
    return _BLOCK.sub(lambda m: f"<!-- diff {m[1]} {m[2]} -->\n```diff\n{diff(m[1], m[2])}```\n", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
