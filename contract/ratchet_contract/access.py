"""Who may do what: roles, scopes, and the name that a job belongs to."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

OWNER_PATTERN: Final = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"
LOCAL_OWNER: Final = "local"
"""Who has the run directory, where nobody needs a token; also of jobs from before there were owners."""


class Role(StrEnum):
    """Each may do what those before it may."""

    VIEWER = "viewer"  # reads everything
    SUBMITTER = "submitter"  # submits, and acts on jobs of the same owner
    ADMIN = "admin"  # acts on everybody's jobs; tokens and quotas
