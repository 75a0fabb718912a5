"""Python source as a syntax tree, one text at a time.

CPython 3.11 counts the depth of the tree that it makes once for all threads: where another one makes a tree meanwhile, either may
end with ``SystemError: AST constructor recursion depth mismatch`` (github.com/python/cpython/issues/106905 has its kind).
"""

from __future__ import annotations

import ast
import threading
from typing import Final

_ONE_AT_A_TIME: Final = threading.Lock()


def parse(source: bytes, name: str = "<source>") -> ast.Module:
    """Raises ``SyntaxError`` and ``ValueError``; ``RecursionError`` and ``MemoryError`` for what is nested too deeply."""
    with _ONE_AT_A_TIME:
        return ast.parse(source, name)
