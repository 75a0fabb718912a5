"""Local variables that a loop carries from one pass to the next, found in its source: no checkpoint has them.

A script's ``best = 0.0`` before the loop and ``best = max(best, found)`` in its body: a name that the body assigns, and reads at
a place where the same pass of the body may not have assigned it. So is one that only some passes assign and that is read after
the loop (``if found > best: weights = copy(net)``), and a list or dict that the loop fills and that is read after it. A loop
within the body is taken to run at least once. Left out are times of the clock, and what a function reads that is called.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any, Final, TypeAlias

Loop: TypeAlias = ast.For | ast.While

_CLOCK: Final = frozenset({"time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "now"})
_SHOWS: Final = frozenset({
    "print", "set_postfix", "set_postfix_str", "set_description", "set_description_str", "debug", "info", "warning",
})  # fmt: skip
"""Functions and methods that only show what they are given."""
_ADDS: Final = frozenset({"append", "extend", "add", "update", "insert", "appendleft", "setdefault"})
_CONTAINERS: Final = frozenset({"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"})
_PLAIN: Final = frozenset({"max", "min", "sum", "abs", "float", "int", "round", "len", "str", "repr"})
_PLAIN_METHODS: Final = frozenset({"item", "tolist", "cpu", "detach", "mean", "sum", "max", "min", "format", "join"})
"""Functions and methods that do nothing but give a value."""
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def carried_by(loop: Loop, scope: ast.AST | None = None) -> dict[str, ast.Name]:
    """By name, where the body first reads the one of the pass before; else where ``scope``, the loop's function or module, reads
    after the loop what the passes before have left."""
    flow = _Flow()
    if isinstance(loop, ast.While):
        certain = flow.run(loop.body, flow._head(loop.test, set()))
    else:
        certain = flow.run(loop.body, {*_stored([loop.target])})
    clocks = _clocks(loop)
    found = {name: node for name, node in flow.exposed.items() if name in flow.stored and name not in clocks}
    if scope is not None:
        left = (flow.stored - (certain or set()) - clocks) | _filled(loop, scope)
        found |= {name: node for name, node in _read_after(loop, scope).items() if name in left - {*found}}
    return found


def _read_after(loop: Loop, scope: ast.AST) -> dict[str, ast.Name]:
    end = loop.end_lineno or loop.lineno
    later = (node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.lineno > end)
    first: dict[str, ast.Name] = {}
    for node in sorted(later, key=lambda node: (node.lineno, node.col_offset)):
        first.setdefault(node.id, node)
    return {name: node for name, node in first.items() if isinstance(node.ctx, ast.Load)}


def _filled(loop: Loop, scope: ast.AST) -> set[str]:
    """Lists, dicts and sets that ``scope`` makes before the loop, empty or not, and that the loop adds to."""
    made: dict[str, bool] = {}
    before = (node for node in ast.walk(scope) if isinstance(node, ast.Assign) and node.lineno < loop.lineno)
    for node in sorted(before, key=lambda node: node.lineno):
        for target in node.targets:
            made |= dict.fromkeys(_stored([target]), isinstance(target, ast.Name) and _is_container(node.value))
    containers = {name for name, is_one in made.items() if is_one}
    added = set[str]()
    for inner in ast.walk(loop):
        match inner:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _ADDS:
                added.add(name)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                added.add(name)
    return containers & added


def _is_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return getattr(value.func, "attr", getattr(value.func, "id", "")) in _CONTAINERS
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def only_shown(scope: ast.AST, names: Collection[str]) -> set[str]:
    """Those of ``names`` that are printed, and that nothing else depends on in ``scope``, the loop's function or module."""
    shown = [node for node in ast.walk(scope) if _shows(node)]
    found = {*names} & {one.id for node in shown for one in ast.walk(node) if isinstance(one, ast.Name)}
    while wrong := found & _used(scope, found):
        found -= wrong
    return found


def _used(node: ast.AST, shown: set[str]) -> set[str]:
    """Names that are read elsewhere than in what is shown, and in what is given to ``shown`` names."""
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return {*node.names}  # others may read them
    if _shows(node):
        return _given_to_calls(node.value.args, node.value.keywords)  # type: ignore[attr-defined]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    if targets and all(isinstance(one, ast.Name) and one.id in shown for one in targets):
        return _given_to_calls([node])
    own = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()
    return own.union(*(_used(child, shown) for child in ast.iter_child_nodes(node)))


def _given_to_calls(*nodes: Iterable[ast.AST]) -> set[str]:
    """Names within calls of functions that may do something with what they are given."""
    calls = [
        one for node in chain(*nodes) for one in ast.walk(node) if isinstance(one, ast.Call) and not _is_plain(one)
    ]
    return {one.id for call in calls for one in ast.walk(call) if isinstance(one, ast.Name)}


def _is_plain(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in _PLAIN_METHODS
    return isinstance(call.func, ast.Name) and call.func.id in _PLAIN


def _shows(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called, keywords = node.value.func, {keyword.arg for keyword in node.value.keywords}
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in _SHOWS and not (name == "print" and "file" in keywords)


class _Flow:
    """``exposed``: names that were read where they need not have been stored, and where first; ``stored``: all that are."""

    def __init__(self) -> None:
        self.exposed = dict[str, ast.Name]()
        self.stored = set[str]()

    def run(self, statements: Iterable[ast.stmt], known: set[str] | None) -> set[str] | None:
        """``known``: what is stored for certain before ``statements``; what is after them, None where nothing comes after."""
        for one in statements:
            if known is None:
                break
            known = self._one(one, known)
        return known

    def _one(self, one: ast.stmt, known: set[str]) -> set[str] | None:
        if isinstance(one, ast.If):
            known = self._head(one.test, known)
            return _both(self.run(one.body, {*known}), self.run(one.orelse, {*known}))
        if isinstance(one, (ast.For, ast.AsyncFor)):
            return self._loop(one, self._head(one.iter, known) | self._store([one.target]))
        if isinstance(one, ast.While):
            return self._loop(one, self._head(one.test, known))
        if isinstance(one, (ast.With, ast.AsyncWith)):
            for item in one.items:
                known = self._head(item.context_expr, known)
                known = known | self._store([item.optional_vars] if item.optional_vars else [])
            return self.run(one.body, known)
        if isinstance(one, ast.Try):
            after = self.run(one.orelse, self.run(one.body, {*known}))
            for handler in one.handlers:
                after = _both(after, self.run(handler.body, known | ({handler.name} if handler.name else set())))
            return self.run(one.finalbody, known if after is None else after) and after
        if isinstance(one, ast.Match):
            known = self._head(one.subject, known)
            ends = [self.run(case.body, known | self._store([case.pattern])) for case in one.cases]
            return _both(known, *ends)
        if isinstance(one, _FUNCTIONS):
            self.stored.add(one.name)
            return known | {one.name}
        self._read([one], known)
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name) and one.target.id not in known:
            self.exposed.setdefault(one.target.id, one.target)
        known = known | self._store([one])
        return None if isinstance(one, (ast.Return, ast.Raise, ast.Break, ast.Continue)) else known

    def _head(self, node: ast.expr, known: set[str]) -> set[str]:
        """What is stored after the expression, which may store by ``:=``."""
        self._read([node], known)
        return known | self._store([node])

    def _loop(self, loop: Any, known: set[str]) -> set[str]:
        after = self.run(loop.body, {*known})
        after = self.run(loop.orelse, known if after is None else after)
        return known if after is None else after

    def _read(self, nodes: Iterable[ast.AST], known: set[str]) -> None:
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in known:
                self.exposed.setdefault(node.id, node)
            own = known
            if isinstance(node, _COMPREHENSIONS):
                own = known | {*_stored(generator.target for generator in node.generators)}
            if isinstance(node, ast.Lambda):
                own = known | {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
            self._read(ast.iter_child_nodes(node), own)

    def _store(self, nodes: Iterable[ast.AST]) -> set[str]:
        found = {*_stored(nodes)}
        self.stored |= found
        return found


def _both(*ends: set[str] | None) -> set[str] | None:
    """What is stored for certain behind branches of which one is taken."""
    there = [end for end in ends if end is not None]
    return set.intersection(*there) if there else None


def _stored(nodes: Iterable[ast.AST]) -> Iterable[str]:
    for node in nodes:
        if isinstance(node, (*_COMPREHENSIONS, *_FUNCTIONS)):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node.id
        if isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name
        yield from _stored(ast.iter_child_nodes(node))


def _clocks(loop: Loop) -> set[str]:
    """Names that are given nothing but times of the clock."""
    values: dict[str, list[ast.expr]] = {}
    others = set[str]()
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            for target in node.targets:
                values.setdefault(target.id, []).append(node.value)  # type: ignore[attr-defined]
        elif isinstance(node, ast.stmt) and not isinstance(node, (ast.If, ast.While, ast.Try)):
            others |= {*_stored(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))}
    found = values.keys() - others
    while wrong := {name for name in found if not all(_is_time(value, found) for value in values[name])}:
        found -= wrong
    return found


def _is_time(value: ast.expr, clocks: set[str]) -> bool:
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return called in _CLOCK
    return isinstance(value, ast.Name) and value.id in clocks
