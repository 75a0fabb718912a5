"""Looks at a user's hook, and at the shapes of a task's parameters, in a process of its own.

``python -P -m ratchet_hooks.probe``: the request is JSON on standard input, the answer JSON in the file of an open descriptor,
since the user's code may print. Importing that code runs it, so whoever asks sets a time limit; it counts from when the answer's
first byte is there, a line's end, since until then only torch was imported.

Request: ``asker`` (number of the process that waits for the answer), ``answer`` (the descriptor), ``path`` (directories that
come first on ``sys.path``), and ``hook``, ``state``, ``state_args`` as in the spec, or ``task`` and ``task_args``. Answer:
``problems``, each with ``key``, ``code`` and ``detail``; ``shapes``, or null where the task does not tell.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from ratchet_hooks.errors import CustomHookError
from ratchet_hooks.user_hook import find_hook, find_state, last_line

_PR_SET_PDEATHSIG = 1
_LONGEST = 2000  # characters of one sentence
_MOST_SHAPES = 100_000


def main() -> NoReturn:
    """Never returns into the interpreter's end, where a user's threads and exit handlers would be waited for."""
    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # whoever asks may be killed, and would set no limit then
    request: dict[str, Any] = json.load(sys.stdin)
    with suppress(PermissionError):  # another user's: it is there
        os.kill(request["asker"], 0)  # raises where it was killed before this process had asked to end with it
    target: int = request["answer"]
    os.set_inheritable(target, False)
    import torch  # noqa: F401  (the user's code will; its time is not the user's)

    path = request.get("path", [])
    sys.path[:] = [*path, *(p for p in sys.path if p not in (*path, ""))]
    os.write(target, b"\n")
    answer: dict[str, Any] = {"problems": [], "shapes": None}
    if request.get("hook") is not None:
        answer["problems"] += _problem("hook", "hook-import-failed", lambda: find_hook(request["hook"]))
    if request.get("state") is not None:
        arguments = request.get("state_args", {})
        answer["problems"] += _problem(
            "state", "hook-state-unsupported", lambda: find_state(request["state"], arguments)
        )
    if request.get("task") is not None:
        answer["shapes"] = _shapes(request["task"], request.get("task_args", {}))
    os.pwrite(target, json.dumps(answer).encode(), 0)
    os._exit(0)


def _problem(key: str, code: str, look: Callable[[], object]) -> list[dict[str, str]]:
    try:
        look()
    except CustomHookError as error:
        return [{"key": error.key, "code": error.code, "detail": error.detail[:_LONGEST]}]
    except (
        BaseException
    ) as error:  # sys.exit, a descriptor that raises, KeyboardInterrupt: all of it is the user's code
        return [{"key": key, "code": code, "detail": f"looking at it raised {last_line(error)}"[:_LONGEST]}]
    return []


def _shapes(entrypoint: str, args: dict[str, Any]) -> list[list[int]] | None:
    """What ``parameter_shapes()`` of the task says; None where it has none, or it fails."""
    module, _, attribute = entrypoint.partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        shapes = [[int(n) for n in shape] for shape in found(**args).parameter_shapes()]
    except BaseException:
        return None
    return shapes if len(shapes) <= _MOST_SHAPES and all(n >= 0 for shape in shapes for n in shape) else None


if __name__ == "__main__":
    main()
