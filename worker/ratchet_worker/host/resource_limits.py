"""Resource limits of a rank's processes, set before any user code is imported. They are hard limits: neither that code nor the
processes that it starts can raise them, except with the capability ``CAP_SYS_RESOURCE`` (root). Without a limit in the spec,
nothing is set.

Open files: RLIMIT_NOFILE. Memory, with the local launcher: RLIMIT_DATA, which counts a process's private writable memory (heap,
anonymous mappings, stacks), touched or not. RLIMIT_AS is unsuitable: it counts every mapping of every library and file, which for
torch alone is several GiB. An engine bounds a node's memory itself, by a control group.
"""

from __future__ import annotations

import resource

from ratchet_contract.errors import UserError
from ratchet_contract.protocol.messages import LaunchFile


def apply(launch: LaunchFile) -> None:
    """Set the spec's limit on open files and, with the local launcher, this rank's share of the spec's memory, as hard and
    soft limits of this process and, each by itself, of all processes that it starts. Raises ``UserError`` if the machine
    allows less than requested."""
    wanted = launch.spec.resources
    if wanted.open_files is not None:
        _set(resource.RLIMIT_NOFILE, wanted.open_files, f"resources.open_files is {wanted.open_files}")
    share = launch.spec.memory_per_rank
    if share is not None:
        _set(resource.RLIMIT_DATA, share, f"resources.memory is {wanted.memory}")


def _set(kind: int, value: int, what: str) -> None:
    """Set the hard and soft limit of ``kind`` to ``value``. Raises ``UserError``, with ``what`` in its text, if the machine
    allows less."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY and value > most:
        raise UserError(f"{what}, but this machine allows at most {most}: request less, or raise its limit")
    resource.setrlimit(kind, (value, value))
