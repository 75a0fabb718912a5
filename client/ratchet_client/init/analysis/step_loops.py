"""Finds where a script trains in a loop over steps, with batches that it creates itself instead of with a ``DataLoader``."""

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
    """The count of a ``while`` loop that increments ``counter`` by 1, starting from 0. ``total``: the number of all steps, as
    source text. ``exit``: the statement ``if counter >= total: break``, or with ``> last``, at the end of a ``while True`` loop;
    None if the head of the loop has the condition."""

    counter: ast.Name
    total: str
    exit: ast.If | None


@dataclass(frozen=True)
class StepLoop:
    """A loop over training steps without a ``DataLoader``. ``over``: its range or count; None if the number of steps is
    unknown."""

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
        """Return the reason, as text, why the loop cannot be changed to iterate over ``name.steps``; None if it can. ``name``:
        the variable with the Session."""
        if self.over is not None:
            return None
        over = ast.unparse(self.node.iter if isinstance(self.node, ast.For) else self.node.test)
        return f"it goes over {over}: {name}.steps(n), with the number of all steps, goes over those that are left"

    def change(self, patching: Patching, name: str) -> None:
        """Record the edits that make the loop iterate over ``name.steps``; nothing if ``over`` is None. A ``while`` loop becomes
        a ``for`` loop; the increment of its counter is kept, since the code after it may read the counter. An optional remark is
        added if the script's own resume code set the first step."""
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
    """Return a list with the script's loop over steps if there is one, else the outermost loops over epochs, in file order."""
    steps = _step_loop(patching)
    return [*Loops(patching.source).training_loops()] if steps is None else [steps]


def _step_loop(patching: Patching) -> StepLoop | None:
    """Return the only loop in which ``zero_grad`` is called, as a loop over steps. Return None if there is no such loop, if there
    are several or nested ones, or if the file creates a ``DataLoader``. Also return None if the loop takes batches from an
    iterator, does not train, has an ``else``, may run several times, or is a ``for`` loop with an unknown range. A ``while`` loop
    with an unknown count is returned, with ``over`` None."""
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
    """Return True if the code in ``scope`` runs once: for the module, and for a function that is called at exactly one place of
    the file, outside loops, by code that runs once. Functions that call each other do not."""
    called: list[ast.AST] = []
    while isinstance(scope, Function) and scope not in called:
        called.append(scope)
        calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and called_as(n) == scope.name]
        if len(calls) != 1 or any(isinstance(n, ast.For | ast.While) for n in source.ancestors(calls[0])):
            return False
        scope = source.scope(calls[0])
    return isinstance(scope, ast.Module)


def _counted(source: Source, loop: ast.While) -> Counted | None:
    """Return the count of ``while n < total`` or ``while n <= last``, or of ``while True`` whose last statement is ``if n >=
    total: break`` or ``if n > last: break``. Return None unless ``n`` starts at 0, grows by 1 in each iteration (no
    ``continue``), and the number of steps is constant."""
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
    """Return True if ``end``, the number of steps, has the same value in each iteration. It must consist of constants, variables,
    attributes and operators, and neither the loop nor a function that it calls may change these variables and attributes."""
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
