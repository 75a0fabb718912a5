"""What is known of a user's script before it runs, by service and ranks alike."""

from __future__ import annotations

from typing import Final

SESSION_PACKAGE: Final = "ratchet_worker"


def is_unmanaged(main_file: bytes) -> bool:
    """No mention of the package that holds ``Session``: the script is taken as one that saves and restores by itself.

    A rule that can be seen with the eye, not an analysis. A script whose Session is made in a module that it imports is
    managed from the moment it is made; a mention in the main file, an import or a comment, makes it so from the first line.
    """
    return SESSION_PACKAGE.encode() not in main_file
