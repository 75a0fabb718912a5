"""Finds the attributes of an object that its ``state_dict`` covers: only the object walk saves the others."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, Final

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ratchet_hooks.torch_compat import non_persistent_buffers, own_buffers
from ratchet_worker.state.object_walk import is_user_class

FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, MethodType, partial)
_METHODS: Final = frozenset({"state_dict", "load_state_dict", "get_extra_state", "set_extra_state"})
_BY_NAME: Final = frozenset({"getattr", "setattr", "hasattr"})
_ATTRIBUTE: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})


def stateful_parts(stateful: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by path, the registered objects, and schedulers inside them, that may hold more state than their ``state_dict``
    covers, such as modules."""
    found = {}
    for path, item in stateful.items():
        if isinstance(item, (nn.Module, LRScheduler)) or is_user_class(type(item)):
            found[path] = item
        if isinstance(item, LRScheduler):
            inner = enumerate(vars(item).get("_schedulers", ()))
            found |= stateful_parts({f"{path}._schedulers[{number}]": one for number, one in inner})
    return found


def buffer_tables(stateful: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by path, the buffer tables (``_buffers``) of registered modules and their parts that have buffers which
    ``state_dict`` omits."""
    modules = {path: item for path, item in stateful.items() if isinstance(item, nn.Module)}
    each = (
        (f"{path}.{name}" if name else path, part) for path, m in modules.items() for name, part in m.named_modules()
    )
    return {f"{path}._buffers": own_buffers(part) for path, part in each if non_persistent_buffers(part)}


def covered_attributes(item: Any) -> frozenset[str]:
    """Return the names of attributes that the ``state_dict`` of ``item`` covers, judged by its keys and the class's code."""
    kind: type = type(item)
    state = {} if isinstance(item, nn.Module) else item.state_dict()
    keys = state.items() if isinstance(state, dict) else ()
    return _attributes_in_code(kind) | frozenset(
        key for key, one in keys if isinstance(key, str) and not isinstance(one, FUNCTIONS)
    )


@lru_cache(maxsize=4096)
def _attributes_in_code(kind: type) -> frozenset[str]:
    """Return the names of attributes that a class's state methods, and methods that they call, use; perhaps some more."""
    users = [base for base in kind.__mro__ if is_user_class(base)]
    # A package's class takes care of its own attributes.
    others = [base for base in kind.__mro__ if base not in users and not issubclass(kind, nn.Module)]
    codes = (code for base in others for method in vars(base).values() for code in _codes(method))
    found = {name for code in codes for name in (*_names(code), *_strings(code))}
    waiting, seen = set(_METHODS), set[str]()
    while waiting:
        seen.add(method := waiting.pop())
        for code in (code for base in users for code in _codes(vars(base).get(method))):
            names = {*_attributes_of(code, code.co_varnames[0] if code.co_argcount else "")}
            names |= {*_strings(code)} if _BY_NAME & {*_names(code)} else set()
            found |= names
            waiting |= names - seen
    return frozenset(found)


def forget_classes() -> None:
    """Empty the cache that keeps the script's classes alive."""
    _attributes_in_code.cache_clear()


def _codes(method: Any) -> list[CodeType]:
    """Return the code objects of a function, a property, a class method or a decorated function."""
    if isinstance(method, property):
        return [*_codes(method.fget), *_codes(method.fset)]
    method = getattr(method, "__func__", method)
    if not isinstance(method, FunctionType):
        return []
    return [method.__code__, *_codes(getattr(method, "__wrapped__", None))]


def _attributes_of(code: CodeType, variable: str) -> Iterator[str]:
    """Yield the names of the attributes of ``variable`` (``self``), and from Python 3.12 on of ``super()``, that ``code``, or a
    function inside it, uses."""
    is_me = False
    for one in dis.get_instructions(code):
        if (one.opname in _ATTRIBUTE and is_me) or one.opname == "LOAD_SUPER_ATTR":
            yield one.argval
        loads = "LOAD_FAST" in one.opname or one.opname == "LOAD_DEREF"
        last = one.argval[-1] if isinstance(one.argval, tuple) and one.argval else one.argval
        is_me = (loads and last == variable) or (one.opname == "COPY" and is_me)
    for inner in _inner(code):
        yield from _attributes_of(inner, variable)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that ``code``, or a function inside it, uses."""
    yield from code.co_names
    for inner in _inner(code):
        yield from _names(inner)


def _strings(code: CodeType) -> Iterator[str]:
    """Yield the constant strings in ``code`` and in the functions inside it."""
    for one in code.co_consts:
        yield from (item for item in (one if isinstance(one, tuple) else (one,)) if isinstance(item, str))
    for inner in _inner(code):
        yield from _strings(inner)


def _inner(code: CodeType) -> Iterator[CodeType]:
    """Return the code objects directly inside ``code``: functions, lambdas, comprehensions and class bodies."""
    return (one for one in code.co_consts if isinstance(one, CodeType))
