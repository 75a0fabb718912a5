"""The ``Range`` header of a request for one file (RFC 9110, 14.2): one range of bytes."""

from __future__ import annotations

import re
from typing import Final

from ratchet_contract.errors import Refused

_SINGLE_RANGE: Final = re.compile(r"bytes=(?:(\d{1,18})-(\d{1,18})?|-(\d{1,18}))", re.ASCII)


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the positions of the first requested byte and after the last. None: send the whole file. Raises ``Refused`` if the
    file has none of the bytes."""
    match = _SINGLE_RANGE.fullmatch((header or "").replace(" ", ""))
    if match is None:
        return None
    if match[3] is not None:
        begin, end = max(0, size - int(match[3])), size
    else:
        begin, end = int(match[1]), size if match[2] is None else min(size, int(match[2]) + 1)
        if match[2] is not None and int(match[2]) < begin:
            return None
    if begin >= end:
        raise Refused(f"the file has {size} bytes: the range {header!r} has none of them", code="range-not-satisfiable")
    return begin, end
