"""What the source of a task's module proves about its entrypoint; no user code is imported. Only what is certain is a fault:
where a base class or a decorator may make a difference, for example, the first attempt finds out."""

from __future__ import annotations

import ast
import gc
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final

from ratchet_contract.errors import FieldProblem
from ratchet_contract.spec.job import TaskSpec
from ratchet_contract.spec.parse import suggestion

MAX_SOURCE_BYTES: Final = 2 << 20
"""Maximum bytes of a source that is parsed. The tree of 2 MiB of short statements takes 2 GiB of memory."""
_PARSE_LOCK: Final = threading.Lock()


def parse(source: bytes, name: str = "<source>") -> ast.Module:
    """Return the syntax tree of ``source``. Raises ``SyntaxError`` and ``ValueError``; ``RecursionError`` or ``MemoryError`` if
    it is nested too deeply, ``MemoryError`` beyond ``MAX_SOURCE_BYTES``."""
    if len(source) > MAX_SOURCE_BYTES:
        raise MemoryError
    with _PARSE_LOCK:
        # CPython 3.11 has one depth counter for all trees under construction: if another thread makes a tree meanwhile, either
        # may end with "SystemError: AST constructor recursion depth mismatch" (as in github.com/python/cpython/issues/106905).
        # Threads can interleave only where the garbage collector runs Python code.
        collected = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(source, name)
        finally:
            if collected:
                gc.enable()


_DYNAMIC_NAMES: Final = frozenset(
    {"exec", "eval", "globals", "f_globals", "vars", "locals", "setattr", "modules", "__dict__", "__builtins__"}
)
"""Names and attributes by which a module may bind names that its source does not show."""
_ADVICE: Final = "see `python -m pydoc ratchet_worker.task` for what a task needs"


def check(source: bytes, task: TaskSpec, *, package: bool = False) -> FieldProblem | None:
    """Return the first certain fault of ``task`` that its module's ``source`` shows; otherwise None. ``package``: the module is
    an ``__init__.py``."""
    try:
        return _check(parse(source), task, package)
    except (SyntaxError, ValueError):  # perhaps newer syntax than this Python's; the job's interpreter has parsed it
        return None
    except (RecursionError, MemoryError):  # too long, or nested too deeply: long chains of elif or of operators
        return None


def _check(tree: ast.Module, task: TaskSpec, package: bool) -> FieldProblem | None:
    """Return the first certain fault of ``task`` that the syntax tree of its module shows; None if there is none."""
    module, _, attribute = task.entrypoint.partition(":")
    first, _, rest = attribute.partition(".")
    bound = _bindings(tree.body)
    if _may_bind_unseen_names(tree, bound):
        return None
    if first not in bound:
        return None if package else _missing_problem(module, first, bound)
    found = bound[first]
    if rest or len(found) != 1:
        return None
    if isinstance(found[0], ast.ClassDef):
        return _check_class(found[0], task, _assigned_attributes(tree))
    if isinstance(found[0], ast.FunctionDef) and not found[0].decorator_list:
        return _check_arguments(found[0].args, 0, task)
    return None


def _bindings(body: Sequence[ast.stmt]) -> dict[str, list[ast.AST]]:
    """Return every name that the statements bind, outside functions and classes but also in comprehensions, with its nodes."""
    out: dict[str, list[ast.AST]] = {}
    for node in _statements(body):
        for name in _bound_names(node):
            out.setdefault(name, []).append(node)
    return out


def _statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes of the statements, nested ones included, without those inside functions, classes and lambdas."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _statements(list(ast.iter_child_nodes(node)))


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that one node itself binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest


def _assigned_attributes(tree: ast.AST) -> set[str]:
    """Return the names of all attributes that are assigned anywhere in the module, of any object."""
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}


def _may_bind_unseen_names(tree: ast.AST, bound: Mapping[str, object]) -> bool:
    """True if the module may have names that its source does not show. ``bound``: those that it does show."""
    if "*" in bound or "__getattr__" in bound:
        return True
    return any(
        isinstance(node, ast.Global)
        or (isinstance(node, ast.Name) and node.id in _DYNAMIC_NAMES)
        or (isinstance(node, ast.Attribute) and node.attr in _DYNAMIC_NAMES)
        or (isinstance(node, ast.ImportFrom) and any(alias.name in _DYNAMIC_NAMES for alias in node.names))
        for node in ast.walk(tree)
    )


def _missing_problem(module: str, name: str, bound: Mapping[str, list[ast.AST]]) -> FieldProblem:
    """Return the problem for an entrypoint that the module does not have; its text lists classes of the module."""
    classes = [n for n, nodes in bound.items() if any(isinstance(node, ast.ClassDef) for node in nodes)]
    held = f"its classes are {', '.join(classes[:20])}" if classes else "it defines no class"
    text = f"module {module!r} has no {name!r}{suggestion(name, classes)}; {held}"
    return FieldProblem(pointer="/task/entrypoint", code="entrypoint-missing", detail=text)


def _check_class(node: ast.ClassDef, task: TaskSpec, assigned: Set[str]) -> FieldProblem | None:
    """Return the fault of the class ``node`` if it certainly does not fit the task; otherwise None. ``assigned``: attributes that
    the module assigns."""
    plain = all(isinstance(base, ast.Name) and base.id == "object" for base in node.bases)
    if node.decorator_list or node.keywords or not plain:
        return None
    bound = _bindings(node.body)
    present = set(bound) | assigned
    if "__getattr__" in present or "__getattribute__" in present:
        return None
    missing = [name for name in ("build", "loss") if name not in present]
    if "evaluate" not in present and any(isinstance(n, ast.FunctionDef) for n in bound.get("evaluation", [])):
        missing.append("evaluate")
    if missing:
        text = f"{task.entrypoint!r} is not a task: it has no {' and no '.join(missing)}; {_ADVICE}"
        return FieldProblem(pointer="/task/entrypoint", code="entrypoint-wrong", detail=text)
    if present & {"__signature__", "__new__"} or "__init__" in assigned:
        return None
    constructors = bound.get("__init__", [])
    if not constructors:
        return _check_arguments(ast.arguments([], [], None, [], [], None, []), 0, task)
    if len(constructors) != 1 or not isinstance(constructors[0], ast.FunctionDef) or constructors[0].decorator_list:
        return None
    return _check_arguments(constructors[0].args, 1, task)


def _check_arguments(signature: ast.arguments, skip: int, task: TaskSpec) -> FieldProblem | None:
    """Return the problem if the task's arguments certainly do not fit ``signature``. ``skip``: number of leading parameters such
    as ``self``."""
    places = signature.posonlyargs + signature.args
    if len(places) < skip or signature.posonlyargs[skip:]:
        return None
    named = places[skip:]
    required = {a.arg for a in named[: max(0, len(named) - len(signature.defaults))]}
    required |= {a.arg for a, d in zip(signature.kwonlyargs, signature.kw_defaults, strict=True) if d is None}
    known = [a.arg for a in named + signature.kwonlyargs]
    it_takes = f"it takes {', '.join(_describe_argument(name, name in required) for name in known) or 'none'}"
    for name in task.args:
        if name not in known and signature.kwarg is None:
            text = f"{task.entrypoint!r} takes no argument {name!r}{suggestion(name, known)}; {it_takes}"
            pointer = f"/task/args/{_escape_pointer_token(name)}"
            return FieldProblem(pointer=pointer, code="arguments-wrong", detail=text)
    absent = [name for name in known if name in required and name not in task.args]
    if absent:
        text = f"{task.entrypoint!r} needs the argument {' and '.join(map(repr, absent))}; {it_takes}"
        return FieldProblem(pointer="/task/args", code="arguments-wrong", detail=text)
    return None


def _describe_argument(name: str, required: bool) -> str:
    """Return the parameter's name for an error text, with "(required)" if it has no default."""
    return f"{name} (required)" if required else name


def _escape_pointer_token(name: Any) -> str:
    """Return ``name`` as one part of a JSON pointer."""
    return str(name).replace("~", "~0").replace("/", "~1")
