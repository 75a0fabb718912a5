"""Python source as a syntax tree, which no other thread disturbs.

CPython 3.11 counts the depth of the tree that it makes once for all threads: where another one makes a tree meanwhile, either may
end with ``SystemError: AST constructor recursion depth mismatch`` (github.com/python/cpython/issues/106905 has its kind). Others
are whoever calls ``parse``, and whoever formats a traceback. They get their turn within a tree only where the garbage collector
runs Python, so it rests meanwhile.
"""

from __future__ import annotations

import ast
import gc
import threading
from typing import Final

_ONE_AT_A_TIME: Final = threading.Lock()


def parse(source: bytes, name: str = "<source>") -> ast.Module:
    """Raises ``SyntaxError`` and ``ValueError``; ``RecursionError`` and ``MemoryError`` for what is nested too deeply."""
    with _ONE_AT_A_TIME:
        collected = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(source, name)
        finally:
            if collected:
                gc.enable()
