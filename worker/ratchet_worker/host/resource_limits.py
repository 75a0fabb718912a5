"""Hard resource limits of a rank's processes, set before user code is imported."""

from __future__ import annotations

import resource

from ratchet_contract.errors import UserError
from ratchet_contract.protocol.messages import LaunchFile


def apply(launch: LaunchFile) -> None:
    """Set the limits of ``launch`` on open files and memory for this process and its later children. Raises ``UserError`` if the
    present hard limit is lower."""
    wanted = launch.spec.resources
    if wanted.open_files is not None:
        _set(resource.RLIMIT_NOFILE, wanted.open_files, f"resources.open_files is {wanted.open_files}")
    share = launch.spec.memory_per_rank
    if share is not None:
        # Counts private writable memory. RLIMIT_AS would count every mapping of every library, for torch alone several GiB.
        _set(resource.RLIMIT_DATA, share, f"resources.memory is {wanted.memory}")


def _set(kind: int, value: int, what: str) -> None:
    """Set the hard and soft limit of ``kind`` to ``value``. Raises ``UserError``, which names ``what``, if the present hard limit
    is lower."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY and value > most:
        raise UserError(f"{what}, but this machine allows at most {most}: request less, or raise its limit")
    resource.setrlimit(kind, (value, value))
