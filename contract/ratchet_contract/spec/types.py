"""Building blocks of the models of a spec: a base that refuses unknown keys, durations, sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", re.ASCII)
_SIZE = re.compile(r"(\d+)(Ki|Mi|Gi|Ti)", re.ASCII)
_SIZE_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_duration(value: Any) -> Any:
    """Return the seconds of a text like ``30s`` or ``2h``; another value is returned unchanged. Raises ``ValueError``
    for any other text."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            text = "a duration is a number of seconds or a number with s, m, h or d, like 90, '30s' or '2h'"
            raise ValueError(f"{text}, not {value[:40]!r}")
        return float(match[1]) * _UNITS[match[2]]
    return value


def check_size(value: Any) -> Any:
    """Return a size such as ``16Gi`` unchanged. Raises ``ValueError`` for any other form, and for a size of 0."""
    if not isinstance(value, str) or _SIZE.fullmatch(value) is None or size_in_bytes(value) == 0:
        raise ValueError(f"a size is a whole number with Ki, Mi, Gi or Ti, like 16Gi, not {value!r}")
    return value


def size_in_bytes(size: str) -> int:
    """Return the bytes of a ``Size``: 2048 for ``"2Ki"``."""
    match = _SIZE.fullmatch(size)
    assert match is not None
    return int(match[1]) * _SIZE_UNITS[match[2]]


Seconds = Annotated[float, BeforeValidator(parse_duration), Field(gt=0, allow_inf_nan=False, le=10 * 365 * 86400)]
Size = Annotated[str, BeforeValidator(check_size)]


class SpecModel(BaseModel):
    """Base of the models of a spec. Unknown keys are refused; instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Return names and values of only those fields that were set, without the defaults."""
        return ((name, value) for name, value in super().__repr_args__() if name in self.model_fields_set)
