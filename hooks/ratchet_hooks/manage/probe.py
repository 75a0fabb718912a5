"""Examines a user's hook, and the shapes of a task's parameters, in a separate process.

``python -P -m ratchet_hooks.probe``: the request is JSON on standard input, the answer JSON in the file of an open descriptor,
since the user's code may print. Importing that code runs it, so the caller sets a time limit. The limit starts when the answer's
first byte, a newline, is written, since until then only torch is imported.

Request: ``asker`` (PID of the process that waits for the answer), ``answer`` (the descriptor), ``path`` (directories to put first
on ``sys.path``), and ``hook``, ``state``, ``state_args`` as in the spec, or ``task`` and ``task_args``. Answer: ``problems``,
each with ``key``, ``code`` and ``detail``; ``shapes``, or null where the task does not report them.
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

from ratchet_hooks.algorithms.user_import import error_summary, find_hook, find_state
from ratchet_hooks.errors import CustomHookError

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE_CHARS = 2000  # characters of one message
_MAX_SHAPES = 100_000


def main() -> NoReturn:
    """Read a request from standard input, write the answer to the descriptor that the request names, and end the process. It
    does not wait for threads and exit handlers of the user's code. The kernel kills the process when its parent ends. Raises
    ``ProcessLookupError`` if the process ``asker`` has ended before."""
    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # the caller may be killed, and would then enforce no limit
    request: dict[str, Any] = json.load(sys.stdin)
    with suppress(PermissionError):  # another user's process: it exists
        os.kill(request["asker"], 0)  # raises if the caller was killed before the prctl call
    target: int = request["answer"]
    os.set_inheritable(target, False)
    import torch  # noqa: F401  (the user's code will import it; this time does not count)

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


def _problem(key: str, code: str, check: Callable[[], object]) -> list[dict[str, str]]:
    """Run ``check``. Returns an empty list if it succeeds, else a list with the error as one problem: ``key``, ``code`` and
    ``detail``. Every exception is caught, since the user's code may raise any."""
    try:
        check()
    except CustomHookError as error:
        return [{"key": error.key, "code": error.code, "detail": error.detail[:_MAX_MESSAGE_CHARS]}]
    except (
        BaseException
    ) as error:  # sys.exit, a descriptor that raises, KeyboardInterrupt: all of it is the user's code
        return [
            {"key": key, "code": code, "detail": f"inspecting it raised {error_summary(error)}"[:_MAX_MESSAGE_CHARS]}
        ]
    return []


def _shapes(entrypoint: str, args: dict[str, Any]) -> list[list[int]] | None:
    """Import the class ``entrypoint`` (``module:name``), create the task with ``args``, and return the result of its
    ``parameter_shapes()``. None if any of this fails, or the result is not valid or has too many shapes."""
    module, _, attribute = entrypoint.partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        shapes = [[int(n) for n in shape] for shape in found(**args).parameter_shapes()]
    except BaseException:
        return None
    return shapes if len(shapes) <= _MAX_SHAPES and all(n >= 0 for shape in shapes for n in shape) else None
