"""What is known of a user's script before it runs, by service and ranks alike."""

from __future__ import annotations

import re
from typing import Final

SESSION_PACKAGE: Final = "ratchet_worker"
_IMPORT: Final = re.compile(rb"\b(?:import|from)\s+ratchet\b")


def is_unmanaged(main_file: bytes) -> bool:
    """Neither a mention of ``ratchet_worker``, the package that holds ``Session``, nor an import of ``ratchet`` and the word
    ``Session``: the script is taken as one that saves and restores by itself.

    A rule that can be seen with the eye, not an analysis. A script whose Session is made in a module that it imports is
    managed from the moment it is made; a mention in the main file, an import or a comment, makes it so from the first line.
    """
    if SESSION_PACKAGE.encode() in main_file:
        return False
    return _IMPORT.search(main_file) is None or b"Session" not in main_file
