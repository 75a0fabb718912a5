"""Changes of a Python source at positions of its syntax tree. The rest of the text stays as it is."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Iterator
from typing import Final

_LINE: Final = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
"""As Python counts lines."""
_Node = ast.expr | ast.stmt | ast.arg | ast.keyword
_Edit = tuple[int, int, bytes]
"""First byte, the byte behind the last, and what takes their place."""
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module
_ASKS: Final = frozenset({"is_available", "is_initialized", "device_count", "get_rank", "get_world_size"})
_MARK: Final = "\ufeff"
"""A byte order mark, that the syntax tree does not count."""
_NO_END: Final = "\\ No newline at end of file\n"


class Source:
    """``text`` is valid Python. Changes are noted, and made by ``changed``."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text.removeprefix(_MARK))
        self.data = text.encode()
        self.lines = _LINE.findall(self.data)
        self.newline = b"\r\n" if self.lines and self.lines[0].endswith(b"\r\n") else b"\n"
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))
        self._mark = len(_MARK.encode()) if text.startswith(_MARK) else 0
        self._edits: list[_Edit] = []
        self._parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node

    # --- looking -------------------------------------------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """From the parent up to the module."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds ``node``, maybe itself."""
        return next(n for n in (node, *self.ancestors(node)) if isinstance(n, ast.stmt))

    def scope(self, node: ast.AST) -> Scope:
        """The function, class or module that ``node`` is a part of."""
        return next(n for n in self.ancestors(node) if isinstance(n, Scope))

    def siblings(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements of the block that ``statement`` stands in."""
        parent = self._parents[statement]
        for name in ("body", "orelse", "finalbody", "handlers"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        raise AssertionError(f"a statement of {type(parent).__name__}")

    def segment(self, node: ast.expr) -> str:
        return self.data[self._start(node) : self._end(node)].decode()

    def expression(self, node: ast.expr) -> str:
        """As ``segment``, in parentheses where it needs them to stand over several lines."""
        text = self.segment(node)
        try:
            ast.parse(text)
        except SyntaxError:
            return f"({text})"
        return text

    def begins_with(self, node: ast.stmt, word: str) -> bool:
        """Not so of an ``elif``, which is an ``if``."""
        return self.data.startswith(word.encode(), self._start(node))

    def _start(self, node: _Node) -> int:
        return self._at(node.lineno, node.col_offset)

    def _end(self, node: _Node) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        return int(self._starts[line - 1]) + column + (self._mark if line == 1 else 0)

    # --- changing ------------------------------------------------------------------------------------------------------

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        self._edits.append((self._start(node), self._end(node), text.encode()))

    def insert_argument(self, call: ast.Call, text: str) -> None:
        """``text`` as the first argument."""
        given: list[_Node] = [*call.args, *call.keywords]
        if not given:
            self._edits.append((self._end(call) - 1, self._end(call) - 1, text.encode()))
        else:
            self._insert_first(min(given, key=self._start), text)

    def insert_parameter(self, function: ast.FunctionDef, text: str) -> None:
        """``text`` as the first parameter."""
        parameters = [*function.args.posonlyargs, *function.args.args]
        if parameters:
            self._insert_first(parameters[0], text)
            return
        at = self.data.index(b"(", self._start(function)) + 1
        others = function.args.vararg or function.args.kwonlyargs or function.args.kwarg
        self._edits.append((at, at, (text + (", " if others else "")).encode()))

    def _insert_first(self, first: _Node, text: str) -> None:
        """In front of ``first``, on a line of its own where that begins one."""
        before = self.lines[first.lineno - 1][: first.col_offset]
        gap = b" " if before.strip() else self.newline + before
        self._edits.append((self._start(first), self._start(first), text.encode() + b"," + gap))

    def remove(self, statement: ast.stmt) -> None:
        """With its lines, where it stands alone on them. Where its block would be empty that goes, too, if it is an ``if`` that
        only asks; else ``pass`` takes its place."""
        first, last = statement.lineno - 1, (statement.end_lineno or statement.lineno) - 1
        start, end = self._start(statement), self._end(statement)
        before = self.data[self._starts[first] : start]
        behind = self.data[end : self._starts[last + 1]].strip()
        alone = not before.strip() and (not behind or behind.startswith(b"#"))
        others = [s for s in self.siblings(statement) if s is not statement and not self._is_removed(s)]
        parent = self._parents[statement]
        if not others and isinstance(parent, ast.If) and self._only_asks(parent):
            within = self._edits_within(parent)
            self._edits = [edit for edit in self._edits if edit not in within]
            self.remove(parent)
        elif not others or not alone:
            self.replace(statement, "pass")
        else:
            self._edits.append((int(self._starts[first]), int(self._starts[last + 1]), b""))

    def _only_asks(self, node: ast.If) -> bool:
        """Without another branch, without a text that is inserted in it, and by a test that does nothing else."""
        calls = [n for n in ast.walk(node.test) if isinstance(n, ast.Call)]
        asks = all(isinstance(c.func, ast.Attribute) and c.func.attr in _ASKS and not c.args for c in calls)
        plain = not any(isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield)) for n in ast.walk(node.test))
        kept = any(text for _, _, text in self._edits_within(node))
        return not node.orelse and self.begins_with(node, "if") and asks and plain and not kept

    def _edits_within(self, statement: ast.stmt) -> list[_Edit]:
        """Without an insertion in front of it."""
        start, end = self._start(statement), self._starts[statement.end_lineno or statement.lineno]
        return [edit for edit in self._edits if start <= edit[0] and start < edit[1] <= end]

    def _is_removed(self, statement: ast.stmt) -> bool:
        start, end = self._start(statement), self._end(statement)
        return any(first <= start and end <= last and not text for first, last, text in self._edits)

    def remove_names(self, statement: ast.Import | ast.ImportFrom, names: Collection[str]) -> None:
        """What the import binds by one of ``names``."""
        left = [a for a in statement.names if (a.asname or a.name.partition(".")[0]) not in names]
        if not left:
            self.remove(statement)
        elif len(left) < len(statement.names):
            listed = ", ".join(a.name if a.asname is None else f"{a.name} as {a.asname}" for a in left)
            origin = "import"
            if isinstance(statement, ast.ImportFrom):
                origin = f"from {'.' * statement.level}{statement.module or ''} import"
            self.replace(statement, f"{origin} {listed}")

    def insert(
        self, text: str, *, before: ast.stmt | None = None, behind: ast.stmt | None = None, blank: bool = False
    ) -> None:
        """A line with the indentation of the statement that it stands beside; ``blank``: parted from it by an empty one."""
        statement = before or behind
        assert statement is not None
        line = self.lines[statement.lineno - 1]
        indent = line[: len(line) - len(line.lstrip())]
        new, gap = indent + text.encode() + self.newline, self.newline if blank else b""
        if before is not None:
            first = min([before.lineno, *(d.lineno for d in getattr(before, "decorator_list", []))])
            at = int(self._starts[first - 1])
            self._edits.append((at, at, new + gap))
            return
        last = statement.end_lineno or statement.lineno
        ends = b"" if self.lines[last - 1].endswith((b"\n", b"\r")) else self.newline
        self._edits.append((int(self._starts[last]), int(self._starts[last]), ends + gap + new))

    def is_free(self, node: ast.expr | ast.stmt) -> bool:
        """No change is noted within it."""
        return not any(start < self._end(node) and self._start(node) < end for start, end, _ in self._edits)

    def noted(self) -> list[_Edit]:
        """The changes until now, for ``forget``."""
        return [*self._edits]

    def forget(self, noted: list[_Edit]) -> None:
        """All changes since ``noted``."""
        self._edits = noted

    def changed(self) -> str:
        """The text with all changes. Those at one place stand in the order in which they were noted."""
        made, at = b"", 0
        for start, end, text in sorted(self._edits, key=lambda edit: edit[:2]):
            assert start >= at, "two changes of one place"
            made += self.data[at:start] + text
            at = end
        return (made + self.data[at:]).decode()


def unified_diff(old: str, new: str, name: str) -> str:
    """As ``patch -p0`` and ``git apply -p0`` take it."""
    found = difflib.unified_diff(_lines(old), _lines(new), name, name)
    return "".join(line if line.endswith(("\n", "\r")) else f"{line}\n{_NO_END}" for line in found)


def moved_lines(old: str, new: str) -> dict[int, int]:
    """The lines of ``old`` that are in ``new``, too: their numbers there."""
    blocks = difflib.SequenceMatcher(None, _lines(old), _lines(new), autojunk=False).get_matching_blocks()
    return {block.a + n + 1: block.b + n + 1 for block in blocks for n in range(block.size)}


def _lines(text: str) -> list[str]:
    return [part.decode() for part in _LINE.findall(text.encode())]
