"""Errors of the service."""

from __future__ import annotations


class StartError(Exception):
    """The service cannot start. The message says why and what to do."""
