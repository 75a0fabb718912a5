"""What the changes of all kinds of scripts have in common: the source, what its names stand for, and what is left to the user."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from ratchet_client.init.origins import Origins
from ratchet_client.init.source_edits import Source


@dataclass(frozen=True)
class Remark:
    """What is left to the user. ``needed``: without it the changed script would not run, or not resume exactly."""

    line: int
    text: str
    needed: bool = True


@dataclass
class Patching:
    source: Source
    origins: Origins
    remarks: list[Remark] = field(default_factory=list)

    @classmethod
    def of(cls, text: str) -> Patching:
        """Raises ``SyntaxError``."""
        source = Source(text)
        return cls(source, Origins(source.tree))

    def leave(self, node: ast.expr | ast.stmt, text: str, *, needed: bool = True) -> None:
        self.remarks.append(Remark(node.lineno, text, needed))

    def calls(self, wanted: frozenset[str]) -> list[ast.Call]:
        """Those of ``wanted``, as they stand in the file."""
        found = [
            n for n in ast.walk(self.source.tree) if isinstance(n, ast.Call) and self.origins.is_one(n.func, wanted)
        ]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def bound(self) -> set[str]:
        """Every name that the file gives a value, in any scope."""
        nodes = list(ast.walk(self.source.tree))
        return (
            {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
            | {n.arg for n in nodes if isinstance(n, ast.arg)}
            | {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
            | set(self.origins.names)
        )

    def imports_of(self, wanted: frozenset[str]) -> list[ast.stmt]:
        """The statements that bind one of ``wanted``, or the module that has it."""
        found: list[ast.stmt] = []
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
                if any(origin.startswith(f"{name}.") for name in names for origin in wanted):
                    found.append(node)
            elif isinstance(node, ast.ImportFrom) and {f"{node.module}.{a.name}" for a in node.names} & wanted:
                found.append(node)
        return found

    def add_import(self, line: str, beside: list[ast.stmt]) -> None:
        """``line`` behind the imports at the top of the file and those of ``beside``; within the functions that have these, where
        none of them is outside of one."""
        scopes = {id(scope): scope for scope in map(self.source.scope, beside)}
        functions = [s for s in scopes.values() if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = bool(functions) and len(functions) == len(scopes)
        for body in [f.body for f in functions] if inside else [self.source.tree.body]:
            theirs = [s for s in body if any(node in beside for node in ast.walk(s))]
            imports = [*_leading_imports(body), *theirs]
            if imports:
                self.source.insert(line, behind=max(imports, key=lambda s: s.lineno), blank=not inside)
            else:
                self.source.insert(line, before=body[0])


def _leading_imports(body: list[ast.stmt]) -> list[ast.stmt]:
    """Imports in front of the first function, class or loop: what stands between them may be anything else."""
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.For | ast.While):
            break
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found.append(statement)
    return found
