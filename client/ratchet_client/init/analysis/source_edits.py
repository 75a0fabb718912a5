"""Edits of a Python source at positions of its syntax tree. The rest of the text is not changed."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Iterator
from typing import Final

_LINE: Final = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
"""Matches one line as Python counts lines."""
_Node = ast.expr | ast.stmt | ast.arg | ast.keyword
_Edit = tuple[int, int, bytes]
"""Start byte, end byte (exclusive), and the replacement."""
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module
_ASKS: Final = frozenset({"is_available", "is_initialized", "device_count", "get_rank", "get_world_size"})
_MARK: Final = "\ufeff"
"""A byte order mark, which the syntax tree does not count."""
_NO_END: Final = "\\ No newline at end of file\n"


class Source:
    """A Python source and its recorded edits, which ``edited_text`` applies. Raises ``SyntaxError`` if ``text`` is not valid
    Python."""

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

    # --- queries -------------------------------------------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the syntax tree's nodes around ``node``, from its parent up to the module; ``node`` itself is left out."""
        while node in self._parents:
            node = self._parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return ``node`` if it is a statement, else the innermost statement that contains it."""
        return next(n for n in (node, *self.ancestors(node)) if isinstance(n, ast.stmt))

    def scope(self, node: ast.AST) -> Scope:
        """Return the innermost function, lambda, class or module that contains ``node``, and is not ``node`` itself."""
        return next(n for n in self.ancestors(node) if isinstance(n, Scope))

    def siblings(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements (body, ``else`` or ``finally`` block) that directly contains ``statement``."""
        parent = self._parents[statement]
        for name in ("body", "orelse", "finalbody", "handlers"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        raise AssertionError(f"a statement of {type(parent).__name__}")

    def segment(self, node: ast.expr) -> str:
        return self.data[self._start(node) : self._end(node)].decode()

    def expression(self, node: ast.expr) -> str:
        """Return the source text of ``node``, in parentheses if the text alone would not be valid Python."""
        text = self.segment(node)
        try:
            ast.parse(text)
        except SyntaxError:
            return f"({text})"
        return text

    def begins_with(self, node: ast.stmt, word: str) -> bool:
        """Return True if the text of ``node`` begins with ``word``; this distinguishes ``if`` from ``elif``."""
        return self.data.startswith(word.encode(), self._start(node))

    def _start(self, node: _Node) -> int:
        return self._at(node.lineno, node.col_offset)

    def _end(self, node: _Node) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        return int(self._starts[line - 1]) + column + (self._mark if line == 1 else 0)

    # --- edits ------------------------------------------------------------------------------------------------------

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        self._edits.append((self._start(node), self._end(node), text.encode()))

    def replace_head(self, loop: ast.While, text: str) -> None:
        """Record the replacement of ``while ...``, up to the colon and without it, by ``text``."""
        self._edits.append((self._start(loop), self._colon(loop), text.encode()))

    def _colon(self, loop: ast.For | ast.While) -> int:
        """Return the byte position of the colon that ends the head of ``loop``."""
        # Only parentheses and comments stand between the last expression and the colon.
        at = self._end(loop.test if isinstance(loop, ast.While) else loop.iter)
        while self.data[at : at + 1] != b":":
            at = next(start for start in self._starts if start > at) if self.data[at : at + 1] == b"#" else at + 1
        return at

    def insert_in(self, loop: ast.For | ast.While, text: str) -> None:
        """Record the insertion of a line at the beginning of the loop's body, which must not begin on the loop's line."""
        line = self.lines[loop.body[0].lineno - 1]
        indent = line[: len(line) - len(line.lstrip())]
        at = next(start for start in self._starts if start > self._colon(loop))
        self._edits.append((at, at, indent + text.encode() + self.newline))

    def insert_argument(self, call: ast.Call, text: str) -> None:
        """Record the insertion of ``text`` as the first argument of ``call``."""
        given: list[_Node] = [*call.args, *call.keywords]
        if not given:
            self._edits.append((self._end(call) - 1, self._end(call) - 1, text.encode()))
        else:
            self._insert_first(min(given, key=self._start), text)

    def insert_parameter(self, function: ast.FunctionDef, text: str) -> None:
        """Record the insertion of ``text`` as the first parameter of ``function``."""
        parameters = [*function.args.posonlyargs, *function.args.args]
        if parameters:
            self._insert_first(parameters[0], text)
            return
        at = self.data.index(b"(", self._start(function)) + 1
        others = function.args.vararg or function.args.kwonlyargs or function.args.kwarg
        self._edits.append((at, at, (text + (", " if others else "")).encode()))

    def _insert_first(self, first: _Node, text: str) -> None:
        """Record the insertion of ``text`` and a comma before ``first``."""
        before = self.lines[first.lineno - 1][: first.col_offset]
        gap = b" " if before.strip() else self.newline + before
        self._edits.append((self._start(first), self._start(first), text.encode() + b"," + gap))

    def remove(self, statement: ast.stmt, *, comment: bool = False) -> None:
        """Record the removal of ``statement``, or its replacement by ``pass`` where needed; an ``if`` left empty may go, too.
        ``comment``: also remove comments and empty lines directly above."""
        first, last = statement.lineno - 1, (statement.end_lineno or statement.lineno) - 1
        start, end = self._start(statement), self._end(statement)
        before = self.data[self._starts[first] : start]
        behind = self.data[end : self._starts[last + 1]].strip()
        alone = not before.strip() and (not behind or behind.startswith(b"#"))
        others = [s for s in self.siblings(statement) if s is not statement and not self._is_removed(s)]
        parent = self._parents[statement]
        if not others and isinstance(parent, ast.If) and self._is_removable_if(parent):
            within = self._edits_within(parent)
            self._edits = [edit for edit in self._edits if edit not in within]
            self.remove(parent)
        elif not others or not alone:
            self.replace(statement, "pass")
        else:
            while comment and self.lines[first - 1].strip()[:1] in (b"", b"#"):
                first -= 1
            self._edits.append((int(self._starts[first]), int(self._starts[last + 1]), b""))

    def _is_removable_if(self, node: ast.If) -> bool:
        """Return True if the ``if`` has no other branch, no insertion in it, and a test without side effects."""
        calls = [n for n in ast.walk(node.test) if isinstance(n, ast.Call)]
        asks = all(isinstance(c.func, ast.Attribute) and c.func.attr in _ASKS and not c.args for c in calls)
        plain = not any(isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield)) for n in ast.walk(node.test))
        kept = any(text for _, _, text in self._edits_within(node))
        return not node.orelse and self.begins_with(node, "if") and asks and plain and not kept

    def _edits_within(self, statement: ast.stmt) -> list[_Edit]:
        """Return the recorded edits in the lines of ``statement``, without an insertion directly before it."""
        start, end = self._start(statement), self._starts[statement.end_lineno or statement.lineno]
        return [edit for edit in self._edits if start <= edit[0] and start < edit[1] <= end]

    def _is_removed(self, statement: ast.stmt) -> bool:
        """Return True if an edit removes the whole statement."""
        start, end = self._start(statement), self._end(statement)
        return any(first <= start and end <= last and not text for first, last, text in self._edits)

    def remove_names(self, statement: ast.Import | ast.ImportFrom, names: Collection[str]) -> None:
        """Record the removal of ``names``, as the file uses them, from an import statement."""
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
        """Record the insertion of the line ``text`` before the statement ``before``, or after the statement ``behind``.
        Exactly one of the two is given. The line gets the statement's indentation. ``blank``: also insert an empty line
        between the two."""
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

    def is_unedited(self, node: ast.expr | ast.stmt) -> bool:
        """Return True if no recorded edit overlaps the text of ``node``."""
        return not any(start < self._end(node) and self._start(node) < end for start, end, _ in self._edits)

    def checkpoint(self) -> list[_Edit]:
        """Return a copy of the edits recorded until now, to be passed to ``rollback``."""
        return [*self._edits]

    def rollback(self, checkpoint: list[_Edit]) -> None:
        """Discard all edits recorded after ``checkpoint`` was taken."""
        self._edits = checkpoint

    def edited_text(self) -> str:
        """Return the text with all recorded edits applied. They must not overlap."""
        made, at = b"", 0
        for start, end, text in sorted(self._edits, key=lambda edit: edit[:2]):
            assert start >= at, "two changes of one place"
            made += self.data[at:start] + text
            at = end
        return (made + self.data[at:]).decode()


def unified_diff(old: str, new: str, name: str) -> str:
    """Return a unified diff from ``old`` to ``new``; "" if they are equal. ``name``: the file name in the diff."""
    found = difflib.unified_diff(_lines(old), _lines(new), name, name)
    return "".join(line if line.endswith(("\n", "\r")) else f"{line}\n{_NO_END}" for line in found)


def moved_lines(old: str, new: str) -> dict[int, int]:
    """Return the numbers of the unchanged lines of ``old``, each with its number in ``new``; from 1."""
    blocks = difflib.SequenceMatcher(None, _lines(old), _lines(new), autojunk=False).get_matching_blocks()
    return {block.a + n + 1: block.b + n + 1 for block in blocks for n in range(block.size)}


def _lines(text: str) -> list[str]:
    return [part.decode() for part in _LINE.findall(text.encode())]
