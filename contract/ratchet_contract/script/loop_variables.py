"""Finds, in source code, local variables that a loop carries from one pass to the next, such as ``best`` in
``best = max(best, found)``. A checkpoint contains them only if the script has them saved."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any, Final, TypeAlias

Loop: TypeAlias = ast.For | ast.While

_CLOCK: Final = frozenset({"time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "now"})
_DISPLAY_FUNCTIONS: Final = frozenset({
    "print", "set_postfix", "set_postfix_str", "set_description", "set_description_str", "debug", "info", "warning",
})  # fmt: skip
"""Functions and methods that only display their arguments."""
_MUTATING_METHODS: Final = frozenset({
    "append", "extend", "add", "update", "insert", "appendleft", "extendleft", "setdefault", "pop", "popleft", "popitem",
    "remove", "discard", "rotate", "sort", "reverse", "clear",
})  # fmt: skip
"""Methods that change a container."""
_NOT_IN_PLACE: Final = frozenset({"requires_grad_", "share_memory_", "unscale_"})
_CONTAINERS: Final = frozenset({"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"})
_PURE_FUNCTIONS: Final = frozenset({"max", "min", "sum", "abs", "float", "int", "round", "len", "str", "repr"})
_PURE_METHODS: Final = frozenset({"item", "tolist", "cpu", "detach", "mean", "sum", "max", "min", "format", "join"})
"""Functions and methods that only return a value."""
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def carried_variables(loop: Loop, scope: ast.AST | None = None) -> dict[str, ast.Name]:
    """Return the local variables that ``loop`` carries from one pass to the next, each with a place where it is read. Variables
    with values of a clock are left out. ``scope``: the function or module around the loop. If it is given, the result also
    contains variables that only some passes assign and that are read after the loop. It then also contains containers and tensors
    that the loop changes in place and that are read in or after it."""
    flow = _Flow()
    if isinstance(loop, ast.While):
        certain = flow.run(loop.body, flow._expression(loop.test, set()))
    else:
        certain = flow.run(loop.body, {*_stored([loop.target])})
    clocks = _clock_variables(loop)
    found = {name: node for name, node in flow.read_before_write.items() if name in flow.stored and name not in clocks}
    if scope is not None:
        filled = _filled(loop, scope)
        found |= {name: node for name, node in _reads_except_fills(loop).items() if name in filled - flow.stored}
        left = (flow.stored - (certain or set()) - clocks) | filled
        found |= {name: node for name, node in _read_after(loop, scope).items() if name in left - {*found}}
    return found


def _reads_except_fills(loop: Loop) -> dict[str, ast.Name]:
    """Return a place where the body reads each name. A statement such as ``x.append(y)``, and ``x[i] = y``, do not count as reads
    of ``x``."""
    filling = set[int]()
    for inner in ast.walk(loop):
        match inner:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as name, attr=method))) if (
                method in _MUTATING_METHODS
            ):
                filling.add(id(name))
            case ast.Subscript(value=ast.Name() as name, ctx=ast.Store()):
                filling.add(id(name))
    reads = (n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    first: dict[str, ast.Name] = {}
    for node in reads:
        if id(node) not in filling:
            first.setdefault(node.id, node)
    return first


def _read_after(loop: Loop, scope: Any) -> dict[str, ast.Name]:
    """Return the names that ``scope`` reads after the loop and may not have stored between the loop and this read, each with a
    place where it is read."""
    flow = _Flow(loop)
    flow.run(scope.body, set())
    return flow.read_before_write


def _filled(loop: Loop, scope: ast.AST) -> set[str]:
    """Return the names that exist before the loop in ``scope`` and whose content the loop changes, such as lists."""
    made: dict[str, bool] = {}
    arguments = ast.walk(scope.args) if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) else ()
    made |= {node.arg: False for node in arguments if isinstance(node, ast.arg)}
    given = [
        node for node in ast.walk(scope) if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.lineno < loop.lineno
    ]
    for node in sorted(given, key=lambda node: node.lineno):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for one, value in _pairs(target, node.value):
                made |= dict.fromkeys(_stored([one]), isinstance(one, ast.Name) and _is_container(value))
    containers = {name for name, is_one in made.items() if is_one}
    added, entered = set[str](), set[str]()
    for inner in ast.walk(loop):
        match inner:
            case ast.Call(func=ast.Attribute(value=of, attr=method)) if method in _MUTATING_METHODS:
                while isinstance(of, ast.Subscript):  # ``history["train"].append(x)``
                    of = of.value
                added |= {of.id} if isinstance(of, ast.Name) else set()
            case ast.Subscript(value=of, ctx=ast.Store()):
                while isinstance(of, ast.Subscript):
                    of = of.value
                entered |= {of.id} if isinstance(of, ast.Name) else set()
            case ast.Call(func=ast.Attribute(value=of, attr=method)) if (
                method.endswith("_") and method not in _NOT_IN_PLACE
            ):
                while isinstance(of, (ast.Subscript, ast.Call, ast.Attribute)):  # ``averages[key].mul_(0.9).add_(x)``
                    of = of.func if isinstance(of, ast.Call) else of.value
                if isinstance(of, ast.Name):
                    entered.add(of.id)
    return (containers & added) | (made.keys() & entered)


def _pairs(target: ast.expr, value: ast.expr | None) -> list[tuple[ast.expr, ast.expr | None]]:
    """Return an assignment as pairs ``(target, value)``: two for ``seen, best = [], 0.0``."""
    match target, value:
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), (ast.Tuple(elts=values) | ast.List(elts=values))):
            if len(targets) == len(values) and not any(isinstance(one, ast.Starred) for one in (*targets, *values)):
                return [*zip(targets, values, strict=True)]
    return [(target, value)]


def _is_container(value: ast.expr | None) -> bool:
    """True if the expression makes a list, dict, set or another known container."""
    if isinstance(value, ast.Call):
        return getattr(value.func, "attr", getattr(value.func, "id", "")) in _CONTAINERS
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def only_displayed(scope: ast.AST, names: Collection[str]) -> set[str]:
    """Return those of ``names`` that are displayed, such as printed or logged, and affect nothing else in ``scope``."""
    shown = [node for node in ast.walk(scope) if _is_display_call(node)]
    found = {*names} & {one.id for node in shown for one in ast.walk(node) if isinstance(one, ast.Name)}
    while wrong := found & _used(scope, found):
        found -= wrong
    return found


def _used(node: ast.AST, displayed: set[str]) -> set[str]:
    """Return the names that ``node`` uses for more than to display them or to compute the ``displayed`` names."""
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return {*node.names}  # other code may read them
    if _is_display_call(node):
        return _passed_to_calls(node.value.args, node.value.keywords)  # type: ignore[attr-defined]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    if targets and all(isinstance(one, ast.Name) and one.id in displayed for one in targets):
        return _passed_to_calls([node])
    own = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()
    return own.union(*(_used(child, displayed) for child in ast.iter_child_nodes(node)))


def _passed_to_calls(*nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names within calls of functions that may have side effects on their arguments."""
    calls = [
        one for node in chain(*nodes) for one in ast.walk(node) if isinstance(one, ast.Call) and not _is_pure_call(one)
    ]
    return {one.id for call in calls for one in ast.walk(call) if isinstance(one, ast.Name)}


def _is_pure_call(call: ast.Call) -> bool:
    """True for a call of a known function or method that only returns a value."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in _PURE_METHODS
    return isinstance(call.func, ast.Name) and call.func.id in _PURE_FUNCTIONS


def _is_display_call(node: ast.AST) -> bool:
    """True for a statement that calls something with a name in ``_DISPLAY_FUNCTIONS``, but not for a ``print`` into a file."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called, keywords = node.value.func, {keyword.arg for keyword in node.value.keywords}
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _DISPLAY_FUNCTIONS and not (name == "print" and "file" in keywords)


class _Flow:
    """Follows statements, and records the names that they read and store. ``read_before_write``: names that are read where they
    may not have been stored yet, each with a place. ``stored``: all names that are stored. ``since``: a loop within the
    statements; if it is given, only reads after this loop count."""

    def __init__(self, since: Loop | None = None) -> None:
        self.read_before_write = dict[str, ast.Name]()
        self.stored = set[str]()
        self._since, self._is_before, self._reads_functions = since, since is not None, since is not None

    def run(self, statements: Iterable[ast.stmt], assigned: set[str] | None) -> set[str] | None:
        """Follow ``statements``. ``assigned``: names that have certainly been stored before them; None: they cannot be reached.
        Return the names that have certainly been stored after them; None if no statement can follow."""
        for one in statements:
            if assigned is None and not self._is_before:
                break
            assigned = self._statement(one, assigned or set())
        return assigned

    def _statement(self, statement: ast.stmt, assigned: set[str]) -> set[str] | None:
        """Follow one statement; arguments and result are as in ``run``."""
        if statement is self._since:
            self.read_before_write, self._is_before = {}, False
            self.run(self._since.orelse, set())
            return set()
        if isinstance(statement, ast.If):
            assigned = self._expression(statement.test, assigned)
            return _intersection(self.run(statement.body, {*assigned}), self.run(statement.orelse, {*assigned}))
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            return self._loop(statement, self._expression(statement.iter, assigned) | self._store([statement.target]))
        if isinstance(statement, ast.While):
            return self._loop(statement, self._expression(statement.test, assigned))
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            for item in statement.items:
                assigned = self._expression(item.context_expr, assigned)
                assigned = assigned | self._store([item.optional_vars] if item.optional_vars else [])
            return self.run(statement.body, assigned)
        if isinstance(statement, (ast.Try, ast.TryStar)):
            after = self.run(statement.orelse, self.run(statement.body, {*assigned}))
            for handler in statement.handlers:
                after = _intersection(
                    after, self.run(handler.body, assigned | ({handler.name} if handler.name else set()))
                )
            return self.run(statement.finalbody, assigned if after is None else after) and after
        if isinstance(statement, ast.Match):
            assigned = self._expression(statement.subject, assigned)
            ends = []
            for case in statement.cases:
                inner = assigned | self._store([case.pattern])
                ends.append(self.run(case.body, self._expression(case.guard, inner) if case.guard else inner))
            return _intersection(assigned, *ends)
        if isinstance(statement, _FUNCTIONS):
            if self._reads_functions:
                self._read([statement], assigned)
            self.stored.add(statement.name)
            return assigned | {statement.name}
        self._read([statement], assigned)
        assigned = assigned | self._store([statement])
        return None if isinstance(statement, (ast.Return, ast.Raise, ast.Break, ast.Continue)) else assigned

    def _expression(self, node: ast.expr, assigned: set[str]) -> set[str]:
        """Follow an expression, and return ``assigned`` with the names that it stores with ``:=``, assumed to be evaluated."""
        self._read([node], assigned)
        return assigned | self._store([node])

    def _loop(self, loop: Any, assigned: set[str]) -> set[str]:
        """Follow an inner loop, assumed to run at least once; return the names certainly stored after it."""
        after = self.run(loop.body, {*assigned})
        after = self.run(loop.orelse, assigned if after is None else after)
        return assigned if after is None else after

    def _read(self, nodes: Iterable[ast.AST], assigned: set[str]) -> None:
        """Record the names that ``nodes`` read and that are not in ``assigned``."""
        for node in nodes:
            name = node.target if isinstance(node, ast.AugAssign) else node
            is_read = node is not name or isinstance(getattr(name, "ctx", None), ast.Load)
            if isinstance(name, ast.Name) and is_read and name.id not in assigned:
                self.read_before_write.setdefault(name.id, name)
            own = assigned
            if isinstance(node, _COMPREHENSIONS):
                self._read([node.generators[0].iter], assigned)
                own = assigned | {*_stored(generator.target for generator in node.generators)}
            if isinstance(node, _FUNCTIONS):
                self._read(_read_at_definition(node), assigned)
                own = assigned | _local_names(node)
            self._read(ast.iter_child_nodes(node), own)

    def _store(self, nodes: Iterable[ast.AST]) -> set[str]:
        """Record the names that ``nodes`` store, and return them; before ``since``, return an empty set."""
        found = {*_stored(nodes)}
        self.stored |= found
        return set() if self._is_before else found


def _read_at_definition(node: Any) -> list[ast.AST]:
    """Return the parts of a function, lambda or class that are evaluated outside it, such as defaults and decorators."""
    around = [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ()), *getattr(node, "keywords", ())]
    if not isinstance(node, ast.ClassDef):
        around += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    return around


def _local_names(node: Any) -> set[str]:
    """Return the local names of a function, lambda or class."""
    stored = set() if isinstance(node, ast.Lambda) else {*_stored(node.body)}
    arguments = () if isinstance(node, ast.ClassDef) else ast.walk(node.args)
    declared = {name for one in ast.walk(node) if isinstance(one, (ast.Global, ast.Nonlocal)) for name in one.names}
    return (stored | {one.arg for one in arguments if isinstance(one, ast.arg)}) - declared


def _intersection(*ends: set[str] | None) -> set[str] | None:
    """Return the names certainly stored after several branches, of which one is taken. None in ``ends``: that branch does not
    continue; None is returned if no branch does."""
    there = [end for end in ends if end is not None]
    return set.intersection(*there) if there else None


def _stored(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """Yield the names that ``nodes`` assign, delete or bind in a pattern, except within comprehensions, functions and classes."""
    for node in nodes:
        if isinstance(node, (*_COMPREHENSIONS, *_FUNCTIONS)):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id
        if isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name
        yield from _stored(ast.iter_child_nodes(node))


def _clock_variables(loop: Loop) -> set[str]:
    """Return the names to which the loop assigns a value that is computed from a clock."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(loop):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for one, value in _pairs(target, node.value):
                    for name in _stored([one]):
                        values.setdefault(name, []).extend([] if value is None else [value])
    found = set[str]()
    while more := {name for name, given in values.items() if any(_reads_clock(one, found) for one in given)} - found:
        found |= more
    return found


def _reads_clock(value: ast.expr, clocks: set[str]) -> bool:
    """True if the expression calls a function named like a clock's, or reads one of the names ``clocks``."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in _CLOCK:
                return True
        elif isinstance(node, ast.Name) and node.id in clocks:
            return True
    return False
