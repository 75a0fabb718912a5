"""Finds where a script reads torchrun's variables, and where it chooses a device as a Session does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ratchet_client.init.analysis.script_source import Patching
from ratchet_client.init.analysis.source_edits import Scope

_NAMES: Final = {"LOCAL_RANK": "local_rank", "RANK": "rank", "WORLD_SIZE": "world_size"}
"""Variables and the corresponding attributes of a Session."""
_DEVICE: Final = frozenset({"torch.device"})
_SET_DEVICE: Final = frozenset({"torch.cuda.set_device"})


class RankVariables:
    """Finds statements of a script that read torchrun's variables or choose a device. It records no edits."""

    def __init__(self, patching: Patching) -> None:
        self._patching, self._source, self._origins = patching, patching.source, patching.origins

    # --- devices -------------------------------------------------------------------------------------------------------

    def device(self, statement: ast.stmt) -> str | None:
        """Return the name of the variable to which ``statement`` assigns the rank's device, as in ``device = torch.device("cuda",
        local_rank)``; None if it is no such choice."""
        values: list[ast.expr] = []
        name = self._chosen([statement], values)
        made = [value for value in values if not isinstance(value, ast.Constant)]
        return name if any("cuda" in ast.unparse(value) for value in made) else None

    def is_text(self, name: str | None) -> bool:
        """Return True if the script uses the device variable ``name`` like a string, as in ``"cuda" in device`` or
        ``device.startswith("cuda")``."""
        for node in ast.walk(self._source.tree):
            match node:
                case ast.Compare(comparators=[ast.Name(id=used)], ops=[ast.In() | ast.NotIn()]) if used == name:
                    return True
                case ast.Attribute(value=ast.Name(id=used), attr=method) if used == name and method != "index":
                    if hasattr(str, method):  # ``index`` is also an attribute of torch.device
                        return True
        return False

    def _chosen(self, block: list[ast.stmt], values: list[ast.expr]) -> str | None:
        """Return the only variable to which ``block`` assigns devices; None if it assigns none or does more. The assigned
        expressions are appended to ``values``."""
        names: set[str | None] = set()
        for statement in block:
            match statement:
                case ast.If() if self._source.begins_with(statement, "if"):
                    names |= {self._chosen(statement.body, values), self._chosen(statement.orelse, values)}
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                    names.add(name if all(map(self._names_device, choices)) else None)
                    values += choices
                case ast.Expr(value=ast.Call(func=function)) if self._origins.is_one(function, _SET_DEVICE):
                    pass
                case _:
                    return None
        return names.pop() if len(names) == 1 else None

    def _names_device(self, value: ast.expr) -> bool:
        """Return True if ``value`` is ``torch.device(...)``, or a string or f-string for the CPU or a CUDA device: ``"cpu"``,
        ``"cuda:0"``, ``f"cuda:{local_rank}"``."""
        if isinstance(value, ast.Call):
            return self._origins.is_one(value.func, _DEVICE)
        first = value.values[0] if isinstance(value, ast.JoinedStr) and value.values else value
        text = first.value if isinstance(first, ast.Constant) else None
        return isinstance(text, str) and text.partition(":")[0] in ("cuda", "cpu")

    def sets_device(self, statement: ast.stmt) -> bool:
        """Return True if ``statement`` is ``torch.cuda.set_device(...)`` with the value of ``LOCAL_RANK``. A Session does the
        same."""
        match statement:
            case ast.Expr(value=ast.Call(func=function, args=[ast.expr() as given])):
                if isinstance(given, ast.Name):
                    stored = self._stored(self._source.scope(statement), given.id)
                    made = self._source.statement(stored[0]) if len(stored) == 1 else None
                    given = made.value if isinstance(made, ast.Assign) and made.targets == stored else given
                return self._origins.is_one(function, _SET_DEVICE) and self._value(given) == "LOCAL_RANK"
        return False

    # --- variables -----------------------------------------------------------------------------------------------------

    def reads(self) -> Iterator[tuple[ast.expr, str]]:
        """Yield each ``os.environ["RANK"]``, and each such expression for LOCAL_RANK or WORLD_SIZE. Each comes with the name of
        the Session's attribute that has the value. An ``int(...)`` around the expression is included. Expressions within an
        ``if`` whose test has the variable's name are left out."""
        for node in ast.walk(self._source.tree):
            name = self._name(node)
            if name is None or not isinstance(node, ast.Subscript):
                continue
            around = list(self._source.ancestors(node))
            asked = [n.test for n in around if isinstance(n, ast.If | ast.IfExp)]
            if not any(isinstance(n, ast.Constant) and n.value == name for test in asked for n in ast.walk(test)):
                whole = isinstance(around[0], ast.Call) and self._value(around[0]) == name
                yield (around[0] if whole else node), _NAMES[name]  # type: ignore[misc]

    def is_whole(self, read: ast.expr) -> bool:
        """Return True if ``read``, an expression from ``reads``, includes the conversion by ``int``."""
        return isinstance(read, ast.Call)

    def is_unused(self, statement: ast.stmt, gone: list[ast.AST]) -> bool:
        """Return True if ``statement``, like ``rank = int(os.environ["RANK"])``, assigns a name that is read only in ``gone``,
        nodes that the patch removes."""
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if self._value(value) is not None:
                within = {id(n) for one in gone for n in ast.walk(one)}
                scope = self._source.scope(statement)
                uses = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name]
                loads = [n for n in uses if isinstance(n.ctx, ast.Load) and id(n) not in within]
                shared = any(
                    isinstance(n, ast.Global | ast.Nonlocal) and name in n.names for n in ast.walk(self._source.tree)
                )
                alone = len(self._stored(scope, name)) == 1 and not shared
                return alone and not loads and not isinstance(scope, ast.ClassDef)
        return False

    def needs_session(self, statement: ast.stmt, gone: list[ast.AST]) -> bool:
        """Return True if the Session must exist before ``statement``. This is so if the statement chooses the rank's device. It
        is also so if the statement assigns the number in RANK, LOCAL_RANK or WORLD_SIZE, and the patched script still needs it.
        ``gone``: the nodes that the patch removes."""
        if self.device(statement) is not None:
            return True
        reads = {id(read) for read, _ in self.reads() if self.is_whole(read)}
        simple = isinstance(statement, ast.Assign) and any(id(n) in reads for n in ast.walk(statement))
        return simple and not self.is_unused(statement, gone)

    def _stored(self, scope: Scope, name: str) -> list[ast.expr]:
        """Return the places in ``scope``, including nested functions, where ``name`` is assigned or deleted."""
        return [
            n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load)
        ]

    def _value(self, node: ast.expr) -> str | None:
        """Return the name of the variable in ``int(os.environ["RANK"])`` or a similar call of ``int``; else None."""
        match node:
            case ast.Call(func=ast.Name(id="int"), args=[value], keywords=[]):
                return self._name(value)
        return None

    def _name(self, node: ast.AST) -> str | None:
        """Return the name of torchrun's variable that ``node`` reads, as in ``os.environ["RANK"]``; else None."""
        match node:
            case ast.Subscript(value=of, slice=ast.Constant(value=name), ctx=ast.Load()):
                known = self._origins.is_one(of, {"os.environ"})
            case ast.Call(func=of, args=[ast.Constant(value=name), *_]):
                known = self._origins.is_one(of, {"os.environ.get", "os.getenv"})
            case _:
                return None
        return name if known and name in _NAMES else None
