"""The ``Range`` header of a request for one file (RFC 9110, 14.2): one range of bytes; what cannot be read is ignored."""

from __future__ import annotations

import re
from typing import Final

from ratchet_contract.errors import Refused

_ONE: Final = re.compile(r"bytes=(?:(\d{1,18})-(\d{1,18})?|-(\d{1,18}))", re.ASCII)


def wanted(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last, of ``size``; None: the whole file, where there is no header, or one that asks for
    several ranges or is none. Raises ``Refused`` (``range-not-satisfiable``)."""
    match = _ONE.fullmatch((header or "").replace(" ", ""))
    if match is None:
        return None
    if match[3] is not None:
        begin, end = max(0, size - int(match[3])), size
    else:
        begin, end = int(match[1]), size if match[2] is None else min(size, int(match[2]) + 1)
        if match[2] is not None and int(match[2]) < begin:
            return None
    if begin >= end:
        raise Refused(f"the file has {size} bytes: there is nothing in {header!r}", code="range-not-satisfiable")
    return begin, end
