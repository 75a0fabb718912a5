"""Examines a user's hook, and the shapes of a task's parameters, in a separate process: ``python -P -m ratchet_hooks.probe``.

The request is a JSON object on standard input. Its keys are ``asker`` (PID of the waiting process), ``answer`` (number of an open
file descriptor), ``path`` (directories for the front of ``sys.path``), ``hook``, ``state``, ``state_args``, ``task`` and
``task_args``. The answer is a JSON object in the file of that descriptor, with the keys ``problems`` and ``shapes`` (null if
unknown). The caller sets a time limit, which starts when the process writes the first byte to that file.
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
    """Read a request from standard input, write the answer to the descriptor that the request names, and end the process."""
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
    """Run ``check``, and return its error as a list of one problem, or an empty list. Every exception is caught."""
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
    """Return ``parameter_shapes()`` of the task class ``entrypoint`` (``module:name``), created with ``args``; None if that
    fails, or if they are invalid or too many."""
    module, _, attribute = entrypoint.partition(":")
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        shapes = [[int(n) for n in shape] for shape in found(**args).parameter_shapes()]
    except BaseException:
        return None
    return shapes if len(shapes) <= _MAX_SHAPES and all(n >= 0 for shape in shapes for n in shape) else None
