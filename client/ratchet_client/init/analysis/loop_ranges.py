"""The numbers that a loop iterates over: ``range(...)``, or a counter of the script."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ratchet_client.init.analysis.script_source import Patching
from ratchet_client.init.analysis.source_edits import Source


@dataclass(frozen=True)
class Range:
    """The ``range(...)`` call of a loop. ``total``: number of iterations, as source text. ``first``: the first number of a new
    run, 0 or 1. ``start``: the expression for the first number in a script with its own resume code; None if there is none."""

    call: ast.Call
    total: str
    first: int = 0
    start: ast.expr | None = None

    def change(self, patching: Patching, loop: ast.For, counted: str) -> None:
        """Record the edits that make ``loop`` iterate over ``counted(total)``, for example ``session.epochs(10)``."""
        source = patching.source
        source.replace(self.call, f"{counted}({self.total})")
        if self.first:
            source.insert(f"{ast.unparse(loop.target)} += 1  # they are counted from 0", before=loop.body[0])
        if self.start is not None:
            begins_by_itself(patching, loop, self.start, counted)


def begins_by_itself(patching: Patching, loop: ast.stmt, start: ast.expr, counted: str) -> None:
    """Add an optional remark that ``loop`` no longer begins at ``start``, but at Ratchet's last checkpoint. ``counted``: the
    function whose result the loop iterates over, such as ``session.epochs``."""
    text = (
        f"it began at {ast.unparse(start)}; {counted} begins at the last checkpoint of Ratchet. Do not have the script "
    )
    patching.add_remark(loop, text + "resume from a file of its own", needed=False)


def range_of(source: Source, loop: ast.For) -> Range | None:
    """Return the range of ``loop``; None if it has none of a supported form."""
    call = range_call(loop.iter)
    plain = isinstance(loop.target, ast.Name) and loop.body[0].lineno > loop.lineno
    if call is None or call.keywords:
        return None
    match call.args:
        case [ast.Starred()]:
            pass
        case [total] | [ast.Constant(value=0), total]:
            return Range(call, source.expression(total))
        case [ast.Constant(value=1), ast.BinOp(left=total, op=ast.Add(), right=ast.Constant(value=1))] if plain:
            return Range(call, source.expression(total), first=1)
        case [start, total] if begins_at_0(source, start, loop):
            return Range(call, source.expression(total), start=start)
    return None


def range_call(over: ast.expr) -> ast.Call | None:
    """Return the ``range(...)`` call in ``over``, also inside ``tqdm(...)``; None if there is none."""
    if not isinstance(over, ast.Call):
        return None
    if isinstance(over.func, ast.Name) and over.func.id == "range":
        return over
    return range_call(over.args[0]) if over.args and called_as(over) == "tqdm" else None


def called_as(call: ast.Call) -> str:
    """Return the last part of the called function's dotted name; "" if it has none."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def begins_at_0(source: Source, value: ast.expr, loop: ast.stmt) -> bool:
    """Return True if ``value`` is recognised as 0 in a new run, such as a variable that is first set to 0 before ``loop``."""
    if isinstance(value, ast.Name):
        given = assignments(source, value.id, loop)
        return (
            bool(given)
            and _is_0(given[0])
            and source.siblings(given[0]) in map(source.siblings, _statements(source, loop))
        )
    options = (n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and called_as(n) == "add_argument")
    defaults = [k.value for n in options if isinstance(value, ast.Attribute) and _destination(n) == value.attr for k in n.keywords
                if k.arg == "default"]  # fmt: skip
    return [ast.unparse(default) for default in defaults] == ["0"]


def assignments(source: Source, name: str, loop: ast.stmt) -> list[ast.stmt]:
    """Return the statements before ``loop`` in its function that assign the variable ``name``, in file order."""
    scope = source.scope(loop)
    names = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load)]
    found = [source.statement(n) for n in names if n.lineno < loop.lineno and source.scope(n) is scope]
    return sorted(found, key=lambda s: s.lineno)


def _is_0(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and len(statement.targets) == 1 and ast.unparse(statement.value) == "0"


def _statements(source: Source, loop: ast.stmt) -> list[ast.stmt]:
    """Return ``loop`` and the statements that contain it in its function, innermost first."""
    scope = source.scope(loop)
    around = (n for n in source.ancestors(loop) if isinstance(n, ast.stmt) and n is not scope)
    return [loop, *(s for s in around if source.scope(s) is scope)]


def _destination(option: ast.Call) -> str:
    """Return the name of the attribute in which argparse stores ``option``, an ``add_argument`` call; "" if it has no name."""
    dest = [k.value.value for k in option.keywords if k.arg == "dest" and isinstance(k.value, ast.Constant)]
    names = [a.value for a in option.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    long = [name for name in names if name.startswith("--")]
    return str(dest[0]) if dest else "".join((long or names)[:1]).lstrip("-").replace("-", "_")
