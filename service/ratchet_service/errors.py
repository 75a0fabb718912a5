"""Errors of the service."""

from __future__ import annotations


class StartError(Exception):
    """The service, or another command of this package, cannot start or go on. The message says why."""
