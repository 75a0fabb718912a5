"""Finds a script's training loop over steps, whose batches come from no ``DataLoader``."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ratchet_client.init.analysis.epoch_loops import Function, Loop, Loops, exits
from ratchet_client.init.analysis.import_origins import LOADERS
from ratchet_client.init.analysis.loop_ranges import (
    Range,
    assignments,
    begins_at_0,
    begins_by_itself,
    called_as,
    range_of,
)
from ratchet_client.init.analysis.script_source import Patching
from ratchet_client.init.analysis.source_edits import Source


@dataclass(frozen=True)
class Counted:
    """The count of a ``while`` loop that increments ``counter`` by 1, from 0. ``total``: number of steps, as source text.
    ``exit``: the ``if`` that ends a ``while True`` loop; else None."""

    counter: ast.Name
    total: str
    exit: ast.If | None


@dataclass(frozen=True)
class StepLoop:
    """A loop over training steps without a ``DataLoader``. ``over``: its range or count; None if unknown."""

    node: ast.For | ast.While
    over: Range | Counted | None

    @property
    def last(self) -> ast.stmt:
        """The last statement of the body that is still there after ``change``."""
        return self.node.body[-2 if isinstance(self.over, Counted) and self.over.exit is not None else -1]

    @property
    def removed_break(self) -> ast.stmt | None:
        """The ``break`` statement that ``change`` removes; None if it removes none."""
        return self.over.exit.body[0] if isinstance(self.over, Counted) and self.over.exit is not None else None

    @property
    def exits(self) -> list[ast.stmt]:
        """The ``break``, ``continue`` and ``return`` statements that leave an iteration, without ``removed_break``."""
        return [one for one in exits(self.node.body) if one is not self.removed_break]

    def unsupported_reason(self, name: str) -> str | None:
        """Return why the loop cannot iterate over ``name.steps``, as text; None if it can. ``name``: the Session."""
        if self.over is not None:
            return None
        over = ast.unparse(self.node.iter if isinstance(self.node, ast.For) else self.node.test)
        return f"it goes over {over}: {name}.steps(n), with the number of all steps, goes over those that are left"

    def change(self, patching: Patching, name: str) -> None:
        """Record the edits that make the loop iterate over ``name.steps``; a ``while`` loop becomes a ``for`` loop. Does
        nothing if ``over`` is None."""
        counted = f"{name}.steps"
        if isinstance(self.over, Range) and isinstance(self.node, ast.For):
            self.over.change(patching, self.node, counted)
        elif isinstance(self.over, Counted) and isinstance(self.node, ast.While):
            source, counter = patching.source, self.over.counter
            source.replace_head(self.node, f"for {counter.id} in {counted}({self.over.total})")
            if self.over.exit is not None:
                source.remove(self.over.exit, comment=True)
            if len(assignments(source, counter.id, self.node)) > 1:
                begins_by_itself(patching, self.node, counter, counted)


def training_loops(patching: Patching) -> list[Loop | StepLoop]:
    """Return a list with the script's loop over steps, or without one its outermost loops over epochs, in file order."""
    steps = _step_loop(patching)
    return [*Loops(patching.source).training_loops()] if steps is None else [steps]


def _step_loop(patching: Patching) -> StepLoop | None:
    """Return the only loop in which ``zero_grad`` is called, if it is seen to be a loop over steps; else None."""
    source, loops = patching.source, Loops(patching.source)
    if patching.calls(LOADERS):
        return None
    found = set[ast.For | ast.While]()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "zero_grad":
            around = [n for n in source.ancestors(node) if isinstance(n, ast.For | ast.While)]
            if len(around) > 1:
                return None
            found |= {*around}
    if len(found) != 1:
        return None
    (loop,) = found
    asks = any(
        isinstance(n, ast.Call) and called_as(n) in ("next", "iter", "__next__") for n in loops.reachable_nodes(loop)
    )
    if asks or loop.orelse or not loops.trains(loop) or not _runs_once(source, source.scope(loop)):
        return None
    if isinstance(loop, ast.While):
        return StepLoop(loop, _counted(source, loop))
    over = range_of(source, loop)
    return None if over is None else StepLoop(loop, over)


def _runs_once(source: Source, scope: ast.AST) -> bool:
    """Return True if the code in ``scope`` is seen to run once, as that of the module does."""
    called: list[ast.AST] = []
    while isinstance(scope, Function) and scope not in called:
        called.append(scope)
        calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and called_as(n) == scope.name]
        if len(calls) != 1 or any(isinstance(n, ast.For | ast.While) for n in source.ancestors(calls[0])):
            return False
        scope = source.scope(calls[0])
    return isinstance(scope, ast.Module)


def _counted(source: Source, loop: ast.While) -> Counted | None:
    """Return the count of a loop such as ``while n < total``, in which ``n`` starts at 0 and grows by 1; else None."""
    leaves: ast.If | None = None
    number: type[ast.cmpop]
    last_number: type[ast.cmpop]
    match loop.test, loop.body[-1]:
        case ast.Constant(value=True | 1), ast.If(test=ast.Compare() as test, body=[ast.Break()], orelse=[]) as leaves:
            number, last_number = ast.GtE, ast.Gt
        case ast.Compare() as test, _:
            number, last_number = ast.Lt, ast.LtE
        case _:
            return None
    match test:
        case ast.Compare(left=ast.Name() as counter, ops=[order], comparators=[end]) if isinstance(
            order, (number, last_number)
        ):
            pass
        case _:
            return None
    names = [n for n in ast.walk(loop) if isinstance(n, ast.Name) and n.id == counter.id]
    stored = [source.statement(n) for n in names if not isinstance(n.ctx, ast.Load)]
    match stored:
        case [ast.AugAssign(op=ast.Add(), value=ast.Constant(value=1)) as increment] if increment in loop.body:
            total = source.expression(end)
            if isinstance(order, last_number):  # ``end`` is the number of the last step
                total = f"{total if isinstance(end, ast.Name | ast.Attribute | ast.Constant) else f'({total})'} + 1"
            continues = any(isinstance(e, ast.Continue) for e in exits(loop.body))
            if begins_at_0(source, counter, loop) and _is_constant(source, end, loop) and not continues:
                return Counted(counter, total, leaves)
    return None


def _is_constant(source: Source, end: ast.expr, loop: ast.While) -> bool:
    """Return True if ``end``, the number of steps, is seen to have the same value in each iteration."""
    if not all(
        isinstance(n, ast.Name | ast.Attribute | ast.Constant | ast.BinOp | ast.operator | ast.expr_context)
        for n in ast.walk(end)
    ):
        return False
    names = {n.id for n in ast.walk(end) if isinstance(n, ast.Name)}
    attributes = {n.attr for n in ast.walk(end) if isinstance(n, ast.Attribute)}
    shared = {name for n in ast.walk(source.tree) if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}
    for n in (n for s in loop.body for n in ast.walk(s)):
        if isinstance(n, ast.Name) and n.id in names and not isinstance(n.ctx, ast.Load):
            return False
    stored = {
        n.attr
        for n in Loops(source).reachable_nodes(loop)
        if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)
    }
    return not names & shared and not attributes & stored
