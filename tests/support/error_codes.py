"""The codes of problems and warnings that the sources give users. Found in the syntax tree, so that a new one is seen wherever it
is written, as a literal or as a constant of its module or of one that it imports from."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_WORD = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
Text = Callable[[ast.expr | None], str | None]
"""The word that an expression stands for, or None."""


def _modules(*folders: str) -> Iterator[tuple[ast.Module, Text]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield _tree(path), _literal_reader(_tree(path))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    found = (n for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
    return {n.target.id: n.value for n in found if isinstance(n.target, ast.Name) and n.value is not None}


def _literal_reader(tree: ast.Module) -> Text:
    constants = _constants(tree)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("ratchet_"):
            for path in ROOT.glob(f"*/{node.module.replace('.', '/')}.py"):
                theirs = _constants(_tree(path))
                constants |= {a.asname or a.name: theirs[a.name] for a in node.names if a.name in theirs}

    def text(node: ast.expr | None) -> str | None:
        if isinstance(node, ast.Name):
            node = constants.get(node.id)
        value = node.value if isinstance(node, ast.Constant) else None
        return value if isinstance(value, str) and _WORD.fullmatch(value) else None

    return text


def _calls(*folders: str) -> Iterator[tuple[str, ast.Call, Text]]:
    """``(name of the function or method, call, reader)``."""
    for tree, text in _modules(*folders):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                function = node.func
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                yield name, node, text


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def field_codes() -> set[str]:
    """Codes of ``FieldProblem`` and of warnings: what submission may say of one key."""
    found: set[str | None] = set()
    for name, call, text in _calls("service", "contract"):
        if name in ("FieldProblem", "Warning_"):
            found.add(text(_keyword(call, "code")))
        elif name in ("refuse", "warn") and len(call.args) >= 2:
            found.add(text(call.args[1]))
        elif name in ("_refuse", "_code_error", "Rule") and call.args:
            found.add(text(call.args[0]))
    found |= custom_hook_codes()
    for tree, text in _modules("service/ratchet_service"):  # ``return "code", "sentence"``
        for node in ast.walk(tree):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
                code = text(node.value.elts[0])
                found.add(code if code and "-" in code else None)
    return {code for code in found if code}


def attempt_codes() -> set[str]:
    """Codes of errors that end an attempt: worker and hooks."""
    raised = ("UserError", "StateError", "CheckpointError", "WorkerError")
    found = {text(_keyword(call, "code")) for name, call, text in _calls("worker") if name in raised}
    return {code for code in found if code} | custom_hook_codes()


def custom_hook_codes() -> set[str]:
    """What is wrong with a user's own hook, at its submission or in an attempt."""
    found = {text(call.args[1]) for name, call, text in _calls("hooks") if name == "CustomHookError"}
    return {code for code in found if code}
