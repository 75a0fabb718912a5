"""Finds the user's loop over steps, epochs or batches, and the variables that it carries from pass to pass."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import islice
from types import FrameType
from typing import Any, Final

from ratchet_contract.plural import join_first
from ratchet_contract.script.loop_variables import carried_variables, only_displayed
from ratchet_worker.state.job_modules import parsed
from ratchet_worker.state.object_walk import is_user_module

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_AROUND: Final = (ast.For, ast.AsyncFor, ast.While, *_FUNCTIONS, ast.Module)


def find_carried(frame: FrameType | None) -> tuple[str, list[str]]:
    """Find the user's loop, in ``frame`` or its callers, that has requested its next item. Return its place and the variables
    that it carries, except merely printed or logged ones; ``("", [])`` without a loop."""
    while frame is not None:
        if _is_users(frame):
            file, line = frame.f_code.co_filename, frame.f_lineno
            found: Any = [node for node, _ in parsed(file) if isinstance(node, ast.For) and _is_iterated_at(node, line)]
            found = found or [one for one in _enclosing_next(frame) if isinstance(one, ast.While)]
            if found:
                loop = found[-1]
                above = next(above for node, above in parsed(file) if node is loop)
                scope = next(one for one in above if isinstance(one, (*_FUNCTIONS, ast.Module)))
                names = carried_variables(loop, scope)
                return f"{file.rpartition('/')[2]}, line {line}", sorted(names.keys() - only_displayed(scope, names))
        frame = frame.f_back
    return "", []


def calls_next(frame: FrameType | None) -> bool:
    """True if the user's code in ``frame`` is calling ``next``, and the innermost loop or function around the call is not a
    ``while`` loop. ``next(iter(...))`` does not count."""
    return (
        frame is not None and _is_users(frame) and any(not isinstance(one, ast.While) for one in _enclosing_next(frame))
    )


def _enclosing_next(frame: FrameType) -> list[ast.AST]:
    """Return, in a list, the innermost loop, function, class or module around the running call of ``next``. The list is empty if
    ``next`` is not being called, and for ``next(iter(...))``."""
    place = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    for node, above in parsed(frame.f_code.co_filename):
        if isinstance(node, ast.Call) and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == place:
            asks = getattr(node.func, "id", getattr(node.func, "attr", "")) in ("next", "__next__")
            looks = any(isinstance(arg, ast.Call) and getattr(arg.func, "id", "") == "iter" for arg in node.args)
            return [next(one for one in above if isinstance(one, _AROUND))] if asks and not looks else []
    return []


def _is_users(frame: FrameType) -> bool:
    """True if the code that runs in ``frame`` is the user's."""
    return is_user_module(str(frame.f_globals.get("__name__")))


def carried_message(place: str, names: Sequence[str], *, within_epoch: bool) -> str:
    """Return the message about variables that a loop carries. ``place``, ``names``: from ``find_carried``. ``within_epoch``: the
    loop is over batches."""
    them, they = ("it", "it starts") if len(names) == 1 else ("them", "they start")
    text = (
        f"{place}: the loop carries {join_first(names)} from one pass to the next, and no checkpoint has {them}: after a resume "
        f"{they} from the value that the script assigns first. Where training or a file depends on {them}: "
        f"kept = session.keep({names[0]}=...) before the first epoch or step; use kept.{names[0]} afterwards"
    )
    each = ". If each epoch resets it, reset it only when loader.start == 0 (loader: as prepare returns it)"
    return text + each * within_epoch


def lost_message(place: str, names: Sequence[str]) -> str:
    """Return the message for the user about variables ``names`` of the loop at ``place`` that a resume has not restored."""
    they, them = ("starts", "it") if len(names) == 1 else ("start", "them")
    return f"{place}: {join_first(names)} {they} again from the value that the script assigns first: no checkpoint has {them}"


def _is_iterated_at(loop: ast.For, line: int) -> bool:
    """True if the expression over which ``loop`` iterates is at ``line``."""
    return loop.iter.lineno <= line <= (loop.iter.end_lineno or loop.iter.lineno)
