"""Encode a rank's JSON state as text that decodes to exactly that state."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Final

from ratchet_contract.errors import StateError

JsonValue = Any

_MAX_DEPTH: Final = 64
_KEYS: Final = frozenset({str})
_ATOMS: Final = frozenset({str, int, bool, type(None)})


def encode_state(state: JsonValue) -> str:
    """Return JSON text that decodes to exactly ``state``. Raise ``StateError``, which names the place, if that is not
    possible."""
    if not _is_json([state], 0):
        _refuse_json(state, "", 0)
    return json.dumps(state, separators=(",", ":"), allow_nan=False)


def _is_json(values: Iterable[JsonValue], depth: int) -> bool:
    """Return True if JSON preserves all of ``values`` and they are not nested too deeply. ``depth``: the nesting level of
    ``values``."""
    if depth > _MAX_DEPTH:
        return False
    for value in values:
        kind = type(value)
        if kind is list:
            if not _is_json(value, depth + 1):
                return False
        elif kind is dict:
            if not (set(map(type, value)) <= _KEYS and _is_json(value.values(), depth + 1)):
                return False
        elif kind is float:
            if not math.isfinite(value):
                return False
        elif kind not in _ATOMS:
            return False
    return True


def _refuse_json(value: JsonValue, pointer: str, depth: int) -> None:
    """Raise ``StateError`` if JSON would change ``value``, or it is nested too deeply; the error names the first such place.
    ``pointer``: JSON pointer to ``value``. ``depth``: the nesting level of ``value``."""
    if depth > _MAX_DEPTH:
        raise StateError(f"state at {pointer or '/'} is nested deeper than {_MAX_DEPTH} levels")
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise StateError(
                    f"state at {pointer or '/'} has the key {key!r}, which is not a string: JSON would change it"
                )
            _refuse_json(item, f"{pointer}/{key}", depth + 1)
    elif type(value) is list:
        for index, item in enumerate(value):
            _refuse_json(item, f"{pointer}/{index}", depth + 1)
    elif type(value) is float:
        if not math.isfinite(value):
            raise StateError(
                f"state at {pointer or '/'} is {value!r}, which JSON cannot represent: encode it as a string"
            )
    elif type(value) not in _ATOMS:
        raise StateError(
            f"state at {pointer or '/'} is a {type(value).__name__}: JSON would not give it back unchanged"
        )
