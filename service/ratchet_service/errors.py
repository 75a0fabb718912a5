"""The error of a command that cannot start or go on. Other errors are in the modules that raise them."""

from __future__ import annotations


class StartError(Exception):
    """The service, or another command of this package, cannot start or go on. The message says why."""
