"""What a rank's processes may have of the machine, set before any of the user's code is imported. Hard limits: neither that code
nor what it starts gets past them.

Open files: RLIMIT_NOFILE. Memory, on the local launcher: RLIMIT_DATA, which counts what a process has of private writable memory
(heap, anonymous mappings, stacks), touched or not. RLIMIT_AS counts every mapping of every library and file, with which torch
alone takes several GiB. An engine bounds a node's memory itself, by a control group.
"""

from __future__ import annotations

import resource

from ratchet_contract.errors import UserError
from ratchet_contract.messages import LaunchFile


def apply(launch: LaunchFile) -> None:
    """To this process and all that it starts. Raises ``UserError`` where the machine allows less than was asked for."""
    wanted = launch.spec.resources
    if wanted.open_files is not None:
        _set(resource.RLIMIT_NOFILE, wanted.open_files, f"resources.open_files is {wanted.open_files}")
    share = launch.spec.memory_of_a_rank
    if share is not None:
        _set(resource.RLIMIT_DATA, share, f"resources.memory is {wanted.memory}")


def _set(kind: int, value: int, what: str) -> None:
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY and value > most:
        raise UserError(f"{what}, but this machine allows at most {most}: ask for less, or raise its limit")
    resource.setrlimit(kind, (value, value))
