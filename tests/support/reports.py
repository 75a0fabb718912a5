"""What ``ratchet report`` has put into a page."""

from __future__ import annotations

import re
from pathlib import Path


def recorded_text(file: Path) -> str:
    """The JSON text of the element that the page reads."""
    [found] = re.findall(r'<script type="application/json" id="recorded">(.*?)</script>', file.read_text(), re.DOTALL)
    return str(found)
