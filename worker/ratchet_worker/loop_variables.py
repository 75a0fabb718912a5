"""Local variables that a loop carries from one step to the next: no checkpoint has them, and no walk of attributes sees them.

A script's ``best = 0.0`` before the loop and ``best = max(best, found)`` in its body. Found in the loop's source: a name that
the body assigns, and reads at a place where the same pass of the body may not have assigned it. A loop within the body is taken
to run at least once. Left out are times of the clock, and what a function reads that is called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from itertools import islice
from types import FrameType
from typing import Any, Final

from ratchet_worker.job_modules import parsed
from ratchet_worker.object_walk import is_users_module

_CLOCK: Final = frozenset({"time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "now"})
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_AROUND: Final = (ast.For, ast.AsyncFor, ast.While, *_FUNCTIONS, ast.Module)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def carried(frame: FrameType | None) -> str | None:
    """Place and names of the user's loop that asks in ``frame``, or through generators there, for its next item, also of a
    ``while`` that does by ``next``; None where there is no such loop, or it carries nothing."""
    while frame is not None:
        if _is_users(frame):
            file, line = frame.f_code.co_filename, frame.f_lineno
            found: Any = [node for node, _ in parsed(file) if isinstance(node, ast.For) and _asks(node, line)]
            found = found or [one for one in _around_next(frame) if isinstance(one, ast.While)]
            if found:
                names = _carried_by(found[-1])
                return f"{file.rpartition('/')[2]}, line {line}: {', '.join(names)}" if names else None
        frame = frame.f_back
    return None


def asks_by_next(frame: FrameType | None) -> bool:
    """Does the user's code in ``frame`` ask by ``next``, elsewhere than in a ``while``? One of an iterator that is made for it,
    ``next(iter(loader))``, is a look."""
    return frame is not None and _is_users(frame) and any(not isinstance(one, ast.While) for one in _around_next(frame))


def _around_next(frame: FrameType) -> list[ast.AST]:
    """The innermost loop, else the function or module, around the call of ``next`` that runs in ``frame``; else nothing."""
    place = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    for node, above in parsed(frame.f_code.co_filename):
        if isinstance(node, ast.Call) and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == place:
            asks = getattr(node.func, "id", getattr(node.func, "attr", "")) in ("next", "__next__")
            looks = any(isinstance(arg, ast.Call) and getattr(arg.func, "id", "") == "iter" for arg in node.args)
            return [next(one for one in above if isinstance(one, _AROUND))] if asks and not looks else []
    return []


def _is_users(frame: FrameType) -> bool:
    return is_users_module(str(frame.f_globals.get("__name__")))


def sentence(found: str) -> str:
    """``found``: of ``carried``."""
    return (
        f"{found}: variables that the loop carries from one pass to the next. No checkpoint has them, so after a resume they "
        "begin as the script makes them. What training, or a file that it writes, depends on: make it an attribute of an object "
        "that session.prepare(SimpleNamespace(...)) takes"
    )


def _asks(loop: ast.For, line: int) -> bool:
    return loop.iter.lineno <= line <= (loop.iter.end_lineno or loop.iter.lineno)


def _carried_by(loop: ast.For | ast.While) -> list[str]:
    flow = _Flow()
    if isinstance(loop, ast.While):
        flow._read([loop.test], set())
    flow.run(loop.body, {*_stored([loop.target])} if isinstance(loop, ast.For) else set())
    return sorted((flow.exposed & flow.stored) - _clocks(loop))


class _Flow:
    """``exposed``: names that were read where they need not have been stored; ``stored``: all that are."""

    def __init__(self) -> None:
        self.exposed = set[str]()
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
            self._read([one.test], known)
            return _both(self.run(one.body, {*known}), self.run(one.orelse, {*known}))
        if isinstance(one, (ast.For, ast.AsyncFor)):
            self._read([one.iter], known)
            return self._loop(one, known | self._store([one.target]))
        if isinstance(one, ast.While):
            self._read([one.test], known)
            return self._loop(one, known)
        if isinstance(one, (ast.With, ast.AsyncWith)):
            for item in one.items:
                self._read([item.context_expr], known)
                known = known | self._store([item.optional_vars] if item.optional_vars else [])
            return self.run(one.body, known)
        if isinstance(one, ast.Try):
            after = self.run(one.orelse, self.run(one.body, {*known}))
            for handler in one.handlers:
                after = _both(after, self.run(handler.body, known | ({handler.name} if handler.name else set())))
            return self.run(one.finalbody, known if after is None else after) and after
        if isinstance(one, ast.Match):
            self._read([one.subject], known)
            ends = [self.run(case.body, known | self._store([case.pattern])) for case in one.cases]
            return _both(known, *ends)
        if isinstance(one, _FUNCTIONS):
            self.stored.add(one.name)
            return known | {one.name}
        self._read([one], known)
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name) and one.target.id not in known:
            self.exposed.add(one.target.id)
        known = known | self._store([one])
        return None if isinstance(one, (ast.Return, ast.Raise, ast.Break, ast.Continue)) else known

    def _loop(self, loop: Any, known: set[str]) -> set[str]:
        after = self.run(loop.body, {*known})
        after = self.run(loop.orelse, known if after is None else after)
        return known if after is None else after

    def _read(self, nodes: Iterable[ast.AST], known: set[str]) -> None:
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in known:
                self.exposed.add(node.id)
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


def _clocks(loop: ast.For | ast.While) -> set[str]:
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
