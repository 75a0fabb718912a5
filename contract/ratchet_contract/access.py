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

    def includes(self, other: Role) -> bool:
        """Whether this role may do all that ``other`` may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


class Scope(StrEnum):
    """What a route asks for. A token may be made with some of those that its role has."""

    JOBS_READ = "jobs:read"  # jobs, attempts, checkpoints, events, logs, series, hooks, quotas
    METRICS_READ = "metrics:read"  # /metrics
    JOBS_WRITE = "jobs:write"  # submit, plan, fork, act, change, delete
    CHECKPOINTS_WRITE = "checkpoints:write"  # verify, pin, prune
    CODE_WRITE = "code:write"  # send code
    TOKENS_WRITE = "tokens:write"  # make, list and revoke tokens
    QUOTAS_WRITE = "quotas:write"  # change quotas


_READING: Final = frozenset({Scope.JOBS_READ, Scope.METRICS_READ})
_SUBMITTING: Final = frozenset({Scope.JOBS_WRITE, Scope.CHECKPOINTS_WRITE, Scope.CODE_WRITE, Scope.TOKENS_WRITE})
SCOPES: Final[dict[Role, frozenset[Scope]]] = {
    Role.VIEWER: _READING,
    Role.SUBMITTER: _READING | _SUBMITTING,
    Role.ADMIN: frozenset(Scope),
}
"""All that a role may; a token without scopes of its own may all of it."""
