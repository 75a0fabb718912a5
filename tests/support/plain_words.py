"""Words that the product's docstrings, comments and names avoid, and what to write instead. ``python -m
tests.support.plain_words`` lists them."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("client", "contract", "hooks", "migrations", "service", "store", "worker")
WORDS = {
    r"who(?:m)?ever\b": "the caller, any process, or the name of the part",
    r"\bso (?:many|often|long) (?:of|as has|times)\b": "N, or the name of the parameter",
    r"\banew\b": "again, or new",
    r"\bwish(?:es|ed)?\b": "desired state, stop request, or want",
    r"\bheed(?:s|ed)?\b": "follows, applies",
    r"\bdeeds?\b": "action",
    r"\bhears? of\b": "receives, reads",
    r"\b(?:is|are|was|were) told\b": "receives, or: reports, stores, logs",
    r"\btells of\b": "reports, describes",
    r"\blast words?\b": "result",
    r"\blet(?:s|ting)? go\b": "release",
    r"\bby its? own (?:hand|word)\b": "itself",
}
NAMES = re.compile(
    r"(?:^|_)(?:told|tells?|telling|heard|hears?|wish|wishe[sd]|beside|anew|insists?|deeds?|heeds?|foreseen?|whoever)(?:_|$)"
)
"""Words that no function, parameter or attribute is named with."""


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Comments, and strings that stand as statements, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + number, line


def names(source: str) -> Iterator[tuple[int, str]]:
    """Functions, parameters and attributes that are defined there, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def found() -> list[str]:
    """``file:line: word: what to write``."""
    named = [
        f"{path.relative_to(ROOT)}:{line}: {name!r}: a name in the field's terms (report, receive, request, check)"
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in names(path.read_text())
        if NAMES.search(name)
    ]
    return named + [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r}: {better}"
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in texts(path.read_text())
        for word, better in WORDS.items()
        if (match := re.search(word, re.sub(r"`+[^`]*`+", "", text), re.IGNORECASE))
    ]


if __name__ == "__main__":
    lines = found()
    print(*lines, sep="\n")
    sys.exit(bool(lines))
