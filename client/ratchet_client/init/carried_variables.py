"""Plain variables that a loop carries on from one pass to the next. No checkpoint has them: after a resume they begin anew."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeGuard

from ratchet_client.init.epoch_loops import Loop, Loops
from ratchet_client.init.patching import Patching

_MAYBE = ast.If | ast.While | ast.Try | ast.TryStar
"""What is given a value in these may keep the one before. (A loop over batches has one.)"""


def tell(patching: Patching, loop: Loop, prepare: str) -> None:
    """Say of each variable what becomes of it. ``prepare``: the call that has an object saved."""
    scope = patching.source.scope(loop.node)
    carried = _carried(loop.node, _given(scope, loop.node))
    for name, node in carried.items():
        patching.leave(node, f"{name} goes on from epoch to epoch, and is in no checkpoint: keep it in an object, say "
                             f"kept = {prepare}(types.SimpleNamespace({name}=...))")  # fmt: skip
    loops = Loops(patching.source)
    inner = (n for n in ast.walk(loop.node) if isinstance(n, ast.For) and n is not loop.node)
    for batches in filter(loops.trains, inner):
        for name, node in _carried(batches, _given(loop.node, batches) - carried.keys()).items():
            text = (
                f"{name} begins anew where a resume goes on within an epoch; that is harmless where it is only printed"
            )
            patching.leave(node, text, needed=False)


def _given(node: ast.AST, before: ast.stmt) -> set[str]:
    """Names that are given a value in ``node`` in front of ``before``."""
    return {n.id for n in ast.walk(node) if _stores(n) and n.lineno < before.lineno}


def _stores(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _carried(loop: ast.For, names: set[str]) -> dict[str, ast.Name]:
    """Those of ``names`` that the body gives another value, and reads before it surely has."""
    given = {n.id for s in loop.body for n in ast.walk(s) if _stores(n)} - {
        n.id for n in ast.walk(loop.target) if _stores(n)
    }
    found: dict[str, ast.Name] = {}
    for node in _read(loop.body, set()):
        if node.id in names & given:
            found.setdefault(node.id, node)
    return found


def _read(body: list[ast.stmt], sure: set[str]) -> Iterator[ast.Name]:
    """Names that are read, but for those that have surely been given a value, which ``sure`` gathers."""
    for statement in body:
        blocks = [block for name in ("body", "orelse", "finalbody") if (block := getattr(statement, name, None))]
        inner = {id(n) for block in blocks for s in block for n in ast.walk(s)}
        names = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and id(n) not in inner]
        augmented = statement.target if isinstance(statement, ast.AugAssign) else None
        yield from (n for n in names if (not _stores(n) or n is augmented) and n.id not in sure)
        sure |= {n.id for n in names if _stores(n)}
        for block in blocks:
            yield from _read(block, set(sure) if isinstance(statement, _MAYBE) else sure)
