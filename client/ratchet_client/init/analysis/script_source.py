"""What the patches for all kinds of scripts share: the source, the origins of its names, and the remarks."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from ratchet_client.init.analysis.import_origins import Origins
from ratchet_client.init.analysis.source_edits import Source


@dataclass(frozen=True)
class Remark:
    """A remark for the user at a line of the script. ``needed``: the user must make a change; else the remark is only
    information."""

    line: int
    text: str
    needed: bool = True


@dataclass
class Patching:
    """A script that is being patched: its source with the recorded edits, the origins of its names, and the remarks."""

    source: Source
    origins: Origins
    remarks: list[Remark] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> Patching:
        """Return a ``Patching`` of the source ``text``, without edits or remarks. Raises ``SyntaxError`` if it is not valid
        Python."""
        source = Source(text)
        return cls(source, Origins(source.tree))

    def add_remark(self, node: ast.expr | ast.stmt, text: str, *, needed: bool = True) -> None:
        self.remarks.append(Remark(node.lineno, text, needed))

    def calls(self, names: frozenset[str]) -> list[ast.Call]:
        """Return the calls of functions and classes whose origins are all in ``names`` (dotted names), in file order."""
        found = [
            n for n in ast.walk(self.source.tree) if isinstance(n, ast.Call) and self.origins.is_one(n.func, names)
        ]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def bound_names(self) -> set[str]:
        """Return the names of the file's variables, parameters, functions, classes and absolute imports, in all scopes, except
        those that ``except`` and ``case`` bind."""
        nodes = list(ast.walk(self.source.tree))
        return (
            {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
            | {n.arg for n in nodes if isinstance(n, ast.arg)}
            | {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
            | set(self.origins.names)
        )

    def imports_of(self, wanted: frozenset[str]) -> list[ast.stmt]:
        """Return the statements that import one of the dotted names in ``wanted``. These are ``from`` imports of the name itself,
        and ``import`` statements of a package or module that contains the name."""
        found: list[ast.stmt] = []
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
                if any(origin.startswith(f"{name}.") for name in names for origin in wanted):
                    found.append(node)
            elif isinstance(node, ast.ImportFrom) and {f"{node.module}.{a.name}" for a in node.names} & wanted:
                found.append(node)
        return found

    def add_import(self, line: str, statements: list[ast.stmt], used: int | None = None) -> None:
        """Record the insertion of the import ``line`` into the module. If all ``statements`` are in functions, insert it into
        these functions instead. The line is inserted after the leading imports and ``statements``, or first if there are none.
        ``used``: only leading imports above this line number count."""
        scopes = {id(scope): scope for scope in map(self.source.scope, statements)}
        functions = [s for s in scopes.values() if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = bool(functions) and len(functions) == len(scopes)
        for body in [f.body for f in functions] if inside else [self.source.tree.body]:
            theirs = [s for s in body if any(node in statements for node in ast.walk(s))]
            imports = [*(s for s in _leading_imports(body) if used is None or s.lineno < used), *theirs]
            if imports:
                self.source.insert(line, behind=max(imports, key=lambda s: s.lineno), blank=not inside)
            else:
                self.source.insert(line, before=body[0])


def _leading_imports(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the imports directly in ``body`` that stand before its first function, class or loop."""
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.For | ast.While):
            break
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found.append(statement)
    return found
