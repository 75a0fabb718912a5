"""Permissions: roles, scopes, and the owner that a job belongs to."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

OWNER_PATTERN: Final = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"
LOCAL_OWNER: Final = "local"
"""Owner of the run directory, where no token is needed; also of jobs from before owners existed."""


class Role(StrEnum):
    """The roles of callers, from the least to the most rights. Each role includes the rights of those before it."""

    VIEWER = "viewer"  # may read everything
    SUBMITTER = "submitter"  # may submit, and act on jobs of the same owner
    ADMIN = "admin"  # may act on everybody's jobs; tokens, quotas and webhooks

    def includes(self, other: Role) -> bool:
        """True if this role has all permissions of ``other``; a role includes itself."""
        order = list(Role)
        return order.index(self) >= order.index(other)


class Scope(StrEnum):
    """The permission that a route requires. A token may be limited to some scopes of its role."""

    JOBS_READ = "jobs:read"  # jobs, attempts, checkpoints, events, logs, series, hooks, quotas, usage, audit log
    METRICS_READ = "metrics:read"  # /metrics
    JOBS_WRITE = "jobs:write"  # submit, plan, fork, act, change, delete
    CHECKPOINTS_WRITE = "checkpoints:write"  # verify, pin, prune
    CODE_WRITE = "code:write"  # send code
    TOKENS_WRITE = "tokens:write"  # make, list and revoke tokens; changes to tokens in the audit log
    QUOTAS_WRITE = "quotas:write"  # change quotas
    WEBHOOKS_WRITE = "webhooks:write"  # read and change webhooks


_READING: Final = frozenset({Scope.JOBS_READ, Scope.METRICS_READ})
_SUBMITTING: Final = frozenset({Scope.JOBS_WRITE, Scope.CHECKPOINTS_WRITE, Scope.CODE_WRITE, Scope.TOKENS_WRITE})
SCOPES: Final[dict[Role, frozenset[Scope]]] = {
    Role.VIEWER: _READING,
    Role.SUBMITTER: _READING | _SUBMITTING,
    Role.ADMIN: frozenset(Scope),
}
"""All scopes of a role; a token without scopes of its own has all of them."""
