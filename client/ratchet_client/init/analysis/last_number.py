"""Gives the iteration variable of a training loop its last value where the loop runs no iteration."""

from __future__ import annotations

import ast
from typing import Final

from ratchet_client.init.analysis.carried_variables import is_read_after
from ratchet_client.init.analysis.epoch_loops import Loop
from ratchet_client.init.analysis.loop_ranges import Range
from ratchet_client.init.analysis.script_source import Patching
from ratchet_client.init.analysis.step_loops import Counted, StepLoop

_OPERANDS: Final = (ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.Subscript)
"""Expressions that need no parentheses as an operand."""


def set_last_number(patching: Patching, loop: Loop | StepLoop) -> None:
    """Record an assignment that gives the iteration variable its last value before the loop, for an attempt that runs no
    iteration. If that is not enough, add a remark instead. Do nothing if the script does not read the variable after the loop, or
    if the loop's range or count is unknown."""
    node, over = loop.node, loop.over if isinstance(loop, StepLoop) else loop.range
    target = node.target if isinstance(node, ast.For) else over.counter if isinstance(over, Counted) else None
    if not isinstance(target, ast.Name) or over is None or not is_read_after(patching.source, node, target.id):
        return
    used = False
    if isinstance(node, ast.For):
        stores = (n for s in node.body for n in ast.walk(s) if not isinstance(getattr(n, "ctx", None), ast.Load))
        used = any(isinstance(n, ast.Name) and n.id == target.id for n in (*ast.walk(node.iter), *stores))
    if used or loop.exits:
        text = "is read after the loop, which has no iteration if none is left: give it a value before the loop, too"
        patching.add_remark(node, f"{target.id} {text}")
        return
    # An attempt that starts after the last step runs no iteration.
    last = over.total
    if isinstance(over, Range) and not over.first:
        plain = isinstance(ast.parse(last, mode="eval").body, _OPERANDS)
        last = f"{last if plain else f'({last})'} - 1"
    patching.source.insert(f"{target.id} = {last}  # where none is left to do", before=node)
