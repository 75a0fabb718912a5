"""Finds where a script trains: its loops over epochs, and the passes over batches in them, including through functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ratchet_client.init.analysis.loop_ranges import Range, called_as, range_of
from ratchet_client.init.analysis.script_source import Patching
from ratchet_client.init.analysis.source_edits import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
Arguments = dict[str, ast.expr]


@dataclass(frozen=True)
class Pass:
    """A loop over batches. ``loader``: the expression that it iterates over, without the calls around it; None if unknown.
    ``calls``: these calls, of ``enumerate`` and ``tqdm``. ``aliases``: the names that were followed to find the loader, each with
    a statement that assigns it."""

    node: ast.For
    loader: ast.expr | None
    calls: list[ast.Call] = field(default_factory=list)
    aliases: list[tuple[str, ast.stmt]] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A ``for`` loop that contains loops over batches. ``range``: the range that it iterates over; None if it has an
    unsupported form. ``passes``: the loops over batches. ``outer``: True if another loop that contains loops over batches
    is nested in it."""

    node: ast.For
    range: Range | None
    passes: list[Pass]
    outer: bool

    @property
    def last(self) -> ast.stmt:
        """The last statement of the loop's body."""
        return self.node.body[-1]

    @property
    def exits(self) -> list[ast.stmt]:
        """The ``break``, ``continue`` and ``return`` statements that leave an iteration."""
        return exits(self.node.body)

    def unsupported_reason(self, name: str) -> str | None:
        """Return why the loop cannot iterate over ``name.epochs``, as text; None if it can. ``name``: the Session or
        Accelerator."""
        if self.outer:
            return f"nested training loops: it is unknown which one is over epochs and must use {name}.epochs(n)"
        if self.range is None:
            return (
                f"it goes over {ast.unparse(self.node.iter)}: {name}.epochs(n), with the number of all epochs, goes over those "
                "that are left; remove the script's own resume code"
            )
        return None

    def change(self, patching: Patching, name: str) -> None:
        """Record the edits that make the loop iterate over ``name.epochs``. The range of the loop must be known."""
        assert self.range is not None
        self.range.change(patching, self.node, f"{name}.epochs")


class Loops:
    """Finds loops and calls in a file. ``functions``: its functions and methods by name, if the name is unique."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.functions = {n.name: n for n in ast.walk(source.tree) if isinstance(n, Function)}
        names = [n.name for n in ast.walk(source.tree) if isinstance(n, Function)]
        for name in {name for name in names if names.count(name) > 1}:
            del self.functions[name]

    def training_loops(self) -> list[Loop]:
        """Return the outermost ``for`` loops that contain loops over batches, themselves or in functions that they call, in file
        order."""
        fors = [n for n in ast.walk(self._source.tree) if isinstance(n, ast.For) and list(self._passes(n.body, ()))]
        below = {id(loop): {id(n) for n in self.reachable_nodes(loop)} for loop in fors}
        found = [
            Loop(
                loop, range_of(self._source, loop), list(self._passes(loop.body, ())),
                any(id(other) in below[id(loop)] for other in fors),
            )
            for loop in fors
            if not any(id(loop) in nodes for nodes in below.values())
        ]  # fmt: skip
        return sorted(found, key=lambda loop: loop.node.lineno)

    def trains(self, node: ast.AST, within: tuple[str, ...] = ()) -> bool:
        """Return True if ``node``, or a function of the file that it calls, calls a method ``backward`` or ``manual_backward``.
        ``within``: functions to skip."""
        for inner in ast.walk(node):
            if not isinstance(inner, ast.Call):
                continue
            if isinstance(inner.func, ast.Attribute) and inner.func.attr in ("backward", "manual_backward"):
                return True
            if self.trained_by(inner, within):
                return True
        return False

    def trained_by(self, call: ast.Call, within: tuple[str, ...] = ()) -> bool:
        """Return True if ``call`` calls a function of the file that trains, as defined by ``trains``. ``within``: as for
        ``trains``."""
        called = self._called(call)
        return called is not None and called.name not in within and self.trains(called, (*within, called.name))

    def _called(self, call: ast.Call) -> Function | None:
        """Return the function of the file that ``call`` calls by name or as a method of ``self``; else None."""
        if isinstance(call.func, ast.Name):
            return self.functions.get(call.func.id)
        if (
            isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id == "self"
        ):
            return self.functions.get(call.func.attr)
        return None

    def _passes(self, body: list[ast.stmt], within: tuple[str, ...]) -> Iterator[Pass]:
        """Yield the innermost training loops in ``body`` and in the functions that it calls. ``within``: functions to skip."""
        for statement in body:
            for node in ast.walk(statement):
                if isinstance(node, ast.For) and self.trains(node):
                    if not list(self._passes(node.body, within)):
                        one = Pass(node, None)
                        yield replace(one, loader=self._loader(node.iter, one))
                elif isinstance(node, ast.Call):
                    function = self._called(node)
                    if function is not None and function.name not in within:
                        arguments = bind(function, node)
                        for one in self._passes(function.body, (*within, function.name)):
                            name = one.loader.id if isinstance(one.loader, ast.Name) else ""
                            yield replace(one, loader=arguments.get(name, one.loader))

    def _loader(self, over: ast.expr, one: Pass) -> ast.expr | None:
        """Return what ``over``, the expression of the loop ``one``, iterates over in the end; None if unknown. Calls and aliases
        on the way are appended to ``one``."""
        if isinstance(over, ast.IfExp):
            return _common_name([self._loader(value, one) for value in (over.body, over.orelse)])
        if isinstance(over, ast.Call):
            if called_as(over) not in ("enumerate", "tqdm") or not over.args:
                return None
            one.calls.append(over)
            return self._loader(over.args[0], one)
        if isinstance(over, ast.Name) and over.id not in [name for name, _ in one.aliases]:
            given = list(self._assignments(over.id, self._source.scope(one.node)))
            below = Pass(one.node, None, [], [*one.aliases, *((over.id, statement) for statement, _ in given)])
            loader = _common_name([None if value is None else self._loader(value, below) for _, value in given])
            if loader is not None:
                one.calls.extend(below.calls)
                one.aliases[:] = below.aliases
                return loader
        return over

    def _assignments(self, name: str, scope: ast.AST) -> Iterator[tuple[ast.stmt, ast.expr | None]]:
        """Yield each statement that assigns ``name`` in ``scope``, with the assigned expression, or None if that is unknown."""
        for node in ast.walk(scope):
            if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
                statement = self._source.statement(node)
                match statement:
                    case ast.Assign(targets=[target], value=value) if target is node:
                        yield statement, value
                    case ast.With():
                        yield (
                            statement,
                            next((i.context_expr for i in statement.items if i.optional_vars is node), None),
                        )
                    case _:
                        yield statement, None

    def reachable_nodes(self, node: ast.AST, within: tuple[str, ...] = ()) -> Iterator[ast.AST]:
        """Yield the nodes in ``node`` and those in the functions of the file that it calls. ``within``: functions to skip."""
        for inner in ast.walk(node):
            if inner is not node:
                yield inner
            function = self._called(inner) if isinstance(inner, ast.Call) else None
            if function is not None and function.name not in within:
                yield from self.reachable_nodes(function, (*within, function.name))


def exits(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the ``break``, ``continue`` and ``return`` statements that end an iteration of the loop with this ``body``."""
    found: list[ast.stmt] = []
    for one in body:
        if isinstance(one, ast.Break | ast.Continue | ast.Return):
            found.append(one)
        elif isinstance(one, ast.For | ast.AsyncFor | ast.While):
            found += [e for e in exits(one.body) if isinstance(e, ast.Return)] + exits(one.orelse)
        elif not isinstance(one, Function | ast.ClassDef):
            for child in ast.iter_child_nodes(one):
                if isinstance(child, ast.stmt):
                    found += exits([child])
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    found += exits(child.body)
    return found


def parameters(scope: ast.AST) -> set[str]:
    """Return the names of the parameters if ``scope`` is a function; an empty set otherwise."""
    return {n.arg for n in ast.walk(scope.args) if isinstance(n, ast.arg)} if isinstance(scope, Function) else set()


def bind(function: Function, call: ast.Call) -> Arguments:
    """Return the argument expressions of ``call`` by the parameter names of ``function``, as far as they are known."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    if names[:1] == ["self"] and isinstance(call.func, ast.Attribute):
        del names[0]
    given = takewhile(lambda a: not isinstance(a, ast.Starred), call.args)
    return dict(zip(names, given, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}


def _common_name(found: list[ast.expr | None]) -> ast.expr | None:
    """Return the first expression if all in ``found`` are names, and the same name; else None."""
    names = [one for one in found if isinstance(one, ast.Name)]
    return names[0] if len(names) == len(found) and len({one.id for one in names}) == 1 else None
