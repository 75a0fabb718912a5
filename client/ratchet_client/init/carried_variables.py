"""Plain variables that a loop carries from one pass to the next. No checkpoint has them: after a resume they start from their
initial values."""

from __future__ import annotations

import ast

from ratchet_client.init.epoch_loops import Loop, Loops
from ratchet_client.init.patching import Patching
from ratchet_contract.loop_variables import carried_by, only_shown


def tell(patching: Patching, loop: Loop, prepare: str) -> None:
    """Say of each variable what becomes of it. ``prepare``: the call that has an object saved."""
    scope = patching.source.scope(loop.node)
    carried = _carried(loop.node, scope)
    shown = only_shown(scope, carried)
    for name, node in carried.items():
        if name in shown:
            patching.leave(
                node, f"{name} starts from its initial value after a resume; it is only printed", needed=False
            )
            continue
        patching.leave(node, f"{name} goes on from epoch to epoch, and is in no checkpoint: keep it in an object, say "
                             f"kept = {prepare}(types.SimpleNamespace({name}=...))")  # fmt: skip
    loops = Loops(patching.source)
    inner = (n for n in ast.walk(loop.node) if isinstance(n, ast.For) and n is not loop.node)
    own = [(batches, loop.node) for batches in inner if loops.trains(batches)]
    others = [(one.node, patching.source.scope(one.node)) for one in loop.passes]
    others = [(batches, function) for batches, function in others if function is not scope]
    for batches, around in (*own, *others):
        for name, node in _carried(batches, around).items():
            if around is loop.node and name in carried:
                continue
            text = (
                f"{name} starts from its initial value where a resume continues within an epoch; that is harmless where it is "
                "only printed"
            )
            patching.leave(node, text, needed=False)


def _carried(loop: ast.For, scope: ast.AST) -> dict[str, ast.Name]:
    """Those that are given a value in ``scope`` in front of ``loop``."""
    names = (n for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    given = {n.id for n in names if n.lineno < loop.lineno}
    return {name: node for name, node in carried_by(loop, scope).items() if name in given}
