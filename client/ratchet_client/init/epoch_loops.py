"""Where a script trains: its loops over epochs, and the passes over batches in them, also through functions of the file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ratchet_client.init.source_edits import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
Arguments = dict[str, ast.expr]


@dataclass(frozen=True)
class Pass:
    """``loader``: what it goes over, below the ``calls`` of ``enumerate`` and progress bars, from the outermost; None where that
    is not seen. ``aliases``: names that were followed, and what gives them their value."""

    node: ast.For
    loader: ast.expr | None
    calls: list[ast.Call] = field(default_factory=list)
    aliases: list[tuple[str, ast.stmt]] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """``for ... in range(...)`` around passes over data. ``count``: the call of ``range``; None where it goes over something
    else. ``epochs``: how many, as the script says it; None where that is not known. ``first``: the number of the first, 0 or 1.
    ``passes``: with loaders as the loop's function names them. ``outer``: there are two such loops, one around the other."""

    node: ast.For
    count: ast.Call | None
    epochs: str | None
    first: int
    passes: list[Pass]
    outer: bool

    def unknown(self, name: str) -> str | None:
        """Why it is not known how to have it go over ``name.epochs``."""
        if self.outer:
            return f"loops that train around loops that train: which one is over epochs, and over {name}.epochs(n), is not known"
        if self.epochs is None:
            return (
                f"it goes over {ast.unparse(self.node.iter)}: {name}.epochs(n), with the number of all epochs, goes over those "
                "that are left; remove what the script does to go on by itself"
            )
        return None

    def change(self, source: Source, name: str) -> None:
        """Have it go over ``name.epochs``, which counts from 0."""
        assert self.count is not None and self.epochs is not None
        source.replace(self.count, f"{name}.epochs({self.epochs})")
        if self.first:
            source.insert(f"{ast.unparse(self.node.target)} += 1  # they are counted from 0", before=self.node.body[0])


class Loops:
    def __init__(self, source: Source) -> None:
        self._source = source
        self.functions = {n.name: n for n in ast.walk(source.tree) if isinstance(n, Function)}
        names = [n.name for n in ast.walk(source.tree) if isinstance(n, Function)]
        for name in {name for name in names if names.count(name) > 1}:
            del self.functions[name]

    def found(self) -> list[Loop]:
        """The outermost ones, in the order of the file."""
        fors = [n for n in ast.walk(self._source.tree) if isinstance(n, ast.For) and list(self._passes(n.body, ()))]
        below = {id(loop): {id(n) for n in self._below(loop)} for loop in fors}
        found = [
            Loop(
                loop, _range(loop.iter), *self._epochs(loop),
                list(self._passes(loop.body, ())), any(id(other) in below[id(loop)] for other in fors),
            )
            for loop in fors
            if not any(id(loop) in nodes for nodes in below.values())
        ]  # fmt: skip
        return sorted(found, key=lambda loop: loop.node.lineno)

    def _epochs(self, loop: ast.For) -> tuple[str | None, int]:
        """How many, and the number of the first one."""
        count = _range(loop.iter)
        plain = isinstance(loop.target, ast.Name) and loop.body[0].lineno > loop.lineno
        match count.args if count is not None and not count.keywords else []:
            case [ast.Starred()]:
                pass
            case [total] | [ast.Constant(value=0), total]:
                return self._source.expression(total), 0
            case [ast.Constant(value=1), ast.BinOp(left=total, op=ast.Add(), right=ast.Constant(value=1))] if plain:
                return self._source.expression(total), 1
        return None, 0

    def trains(self, node: ast.AST, within: tuple[str, ...] = ()) -> bool:
        """Whether a ``backward`` is called in it."""
        for inner in ast.walk(node):
            if not isinstance(inner, ast.Call):
                continue
            if isinstance(inner.func, ast.Attribute) and inner.func.attr in ("backward", "manual_backward"):
                return True
            called = self._called(inner)
            if called is not None and called.name not in within and self.trains(called, (*within, called.name)):
                return True
        return False

    def _called(self, call: ast.Call) -> Function | None:
        """A function of the file, or a method of the class that the call stands in."""
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
        """The innermost loops that train, with loaders in names of ``body``'s function."""
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
        """What is below ``enumerate``, progress bars and other names of it, noted in ``one``; None for other calls."""
        if isinstance(over, ast.IfExp):
            return _same([self._loader(value, one) for value in (over.body, over.orelse)])
        if isinstance(over, ast.Call):
            if called_as(over) not in ("enumerate", "tqdm") or not over.args:
                return None
            one.calls.append(over)
            return self._loader(over.args[0], one)
        if isinstance(over, ast.Name) and over.id not in [name for name, _ in one.aliases]:
            given = list(self._given(over.id, self._source.scope(one.node)))
            below = Pass(one.node, None, [], [*one.aliases, *((over.id, statement) for statement, _ in given)])
            loader = _same([None if value is None else self._loader(value, below) for _, value in given])
            if loader is not None:
                one.calls.extend(below.calls)
                one.aliases[:] = below.aliases
                return loader
        return over

    def _given(self, name: str, scope: ast.AST) -> Iterator[tuple[ast.stmt, ast.expr | None]]:
        """What gives ``name`` a value in ``scope``, and the value; None where it is not seen."""
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

    def _below(self, node: ast.AST, within: tuple[str, ...] = ()) -> Iterator[ast.AST]:
        """Everything in ``node``, and in the functions that it calls."""
        for inner in ast.walk(node):
            if inner is not node:
                yield inner
            function = self._called(inner) if isinstance(inner, ast.Call) else None
            if function is not None and function.name not in within:
                yield from self._below(function, (*within, function.name))


def bind(function: Function, call: ast.Call) -> Arguments:
    """Parameters and what ``call`` gives them; without those of ``*`` and ``**``."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    if names[:1] == ["self"] and isinstance(call.func, ast.Attribute):
        del names[0]
    given = [a for a in call.args if not isinstance(a, ast.Starred)]
    return dict(zip(names, given, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}


def _range(over: ast.expr) -> ast.Call | None:
    """``range(...)``, also within ``tqdm(...)``."""
    if not isinstance(over, ast.Call):
        return None
    if isinstance(over.func, ast.Name) and over.func.id == "range":
        return over
    return _range(over.args[0]) if over.args and called_as(over) == "tqdm" else None


def _same(found: list[ast.expr | None]) -> ast.expr | None:
    """The one name that all are."""
    names = [one for one in found if isinstance(one, ast.Name)]
    return names[0] if len(names) == len(found) and len({one.id for one in names}) == 1 else None


def called_as(call: ast.Call) -> str:
    """The last part of the name of the function."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""
