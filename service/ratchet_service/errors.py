"""Errors of the service."""

from __future__ import annotations


class StartError(Exception):
    """The service cannot start; the message says what to do."""
