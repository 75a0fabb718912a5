"""Import a user's hook and its state by import path, and check their interface. Torch-free."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal

from ratchet_hooks.errors import CustomHookError

Way = Literal["getstate", "state_dict"]
"""How a state is captured and restored."""
_GROUP = "process_group"


def find_hook(path: str) -> Any:
    """Import and return the hook at ``path`` (``module:name``). Runs the user's code. Raises ``CustomHookError`` if it is not
    usable."""
    hook = _import_object("hook", path)
    if inspect.isclass(hook) or not callable(hook):
        kind = "class" if inspect.isclass(hook) else type(hook).__name__
        raise CustomHookError("hook", "hook-signature", f"{path} is a {kind}, not a function hook(state, bucket)")
    if inspect.iscoroutinefunction(hook):
        text = f"{path} is a coroutine: DDP calls a hook and takes its future at once; use def, not async def"
        raise CustomHookError("hook", "hook-signature", text)
    signature = _signature(hook)
    try:
        if signature is not None:
            signature.bind(None, None)
    except TypeError as error:
        text = f"{path}{signature} cannot be called as hook(state, bucket): {error}; it takes two arguments by position"
        raise CustomHookError("hook", "hook-signature", text) from None
    return hook


def find_state(path: str, args: Mapping[str, Any]) -> type:
    """Import and return the state's class at ``path`` (``module:name``). Runs the user's code. Raises ``CustomHookError`` if it
    is not usable."""
    kind = _import_object("state", path)
    if not inspect.isclass(kind):
        text = f"{path} is a {type(kind).__name__}; name the class whose objects are the hook's state"
        raise CustomHookError("state", "hook-state-unsupported", text)
    state_protocol(kind, path)
    signature = _signature(kind)
    try:
        if signature is not None:
            signature.bind(**constructor_arguments(kind, args, None))
    except TypeError as error:
        text = f"state_args do not fit {path}: {error}; it takes {signature}"
        raise CustomHookError("state_args", "hook-state-arguments", text) from None
    return kind


def state_protocol(kind: type, path: str) -> Way:
    """Return how the class saves objects: by ``__getstate__`` and ``__setstate__``, else ``state_dict`` and ``load_state_dict``.
    Raises ``CustomHookError`` for neither."""
    own = {name for base in kind.__mro__ if base is not object for name in vars(base)}
    if "__getstate__" in own and "__setstate__" in own:
        return "getstate"
    if callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None)):
        return "state_dict"
    half = {"__getstate__": "__setstate__", "__setstate__": "__getstate__", "state_dict": "load_state_dict"}
    missing = next((f"{has}, but no {lacks}" for has, lacks in half.items() if has in own and lacks not in own), None)
    text = (
        f"{path} has {missing or 'neither __getstate__ and __setstate__ nor state_dict and load_state_dict'}: without both its "
        "state cannot be saved and restored. Add them (tensors, numbers, strings, lists, dicts), or set hook.state to null"
    )
    raise CustomHookError("state", "hook-state-unsupported", text)


def constructor_arguments(kind: type, args: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """Return ``args``, with ``process_group=group`` added if the class has a parameter of that name which is not in ``args``."""
    signature = _signature(kind)
    if signature is None or _GROUP not in signature.parameters or _GROUP in args:
        return dict(args)
    return {**args, _GROUP: group}


def error_summary(error: BaseException) -> str:
    """Return the last line of an exception's text and its place, such as ``KeyError: 'x' (/code/hooks.py, line 12)``,
    shortened if it is long."""
    said = "".join(traceback.format_exception_only(error)).strip().splitlines() or [type(error).__name__]
    frames = traceback.extract_tb(error.__traceback__)
    text = said[-1][:500]
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text


def _import_object(key: str, path: str) -> Any:
    """Import and return the object at ``path`` (``module:name``). ``key``: of the spec. Raises ``CustomHookError`` if that
    fails."""
    module, _, attribute = path.partition(":")
    try:
        found: Any = import_module(module)
    except (Exception, SystemExit) as error:
        text = f"importing {module} failed: {error_summary(error)}"
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{module}.".startswith(f"{error.name}.")
        ):
            text = (
                f"no module named {error.name!r} in the code directory or the interpreter: {path} is looked for in both"
            )
        raise CustomHookError(key, "hook-import-failed", text) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise CustomHookError(key, "hook-import-failed", _missing_message(found, part))
        found = getattr(found, part)
    return found


def _missing_message(found: Any, part: str) -> str:
    """Return a sentence on the missing attribute ``part``, with similar or available names."""
    names = [name for name in dir(found) if not name.startswith("_") and callable(getattr(found, name, None))]
    near = get_close_matches(part, names, n=1)
    text = f"{getattr(found, '__name__', type(found).__name__)} has no {part!r}"
    return text + (f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(names)[:300] or 'nothing'}")


def _signature(target: Any) -> inspect.Signature | None:
    """Return the signature of a callable; None if it has none, as compiled code may."""
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):  # compiled code without a signature: the first call will fail instead
        return None
