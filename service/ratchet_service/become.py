"""``python -I -S become.py FD COMMAND...``: this process becomes COMMAND, as another user and within limits (``confined``).

FD holds JSON: ``user``, null or ``[uid, gid, groups]``; ``limits``, each null: none; ``cwd``, null: as it is; ``environ``,
COMMAND's. Of the standard library alone, since it starts before every agent. A process of its own, and not code between fork and
exec, since the service has many threads.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from typing import Any

_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_LAST_CAPABILITY = 63


def main(argv: list[str]) -> int:
    """Returns only where COMMAND cannot be run: 126."""
    with os.fdopen(int(argv[1])) as file:
        told: dict[str, Any] = json.load(file)
    command = argv[2:]
    try:
        _limit(told["limits"])
        _become(told["user"])
        if told["cwd"] is not None:
            os.chdir(told["cwd"])
        os.execve(command[0], command, told["environ"])
    except OSError as error:
        print(f"{command[0]}: {error.strerror or error}", file=sys.stderr)
    return 126


def _limit(limits: dict[str, int | None]) -> None:
    kinds = {
        "memory": resource.RLIMIT_DATA,
        "open_files": resource.RLIMIT_NOFILE,
        "cpu": resource.RLIMIT_CPU,
        "core": resource.RLIMIT_CORE,
        "processes": resource.RLIMIT_NPROC,
        "file_size": resource.RLIMIT_FSIZE,
    }
    for name, kind in kinds.items():
        wanted = limits[name]
        if wanted is None:
            continue
        most = resource.getrlimit(kind)[1]
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(kind, (value, value))


def _become(user: tuple[int, int, list[int]] | None) -> None:
    """Raises ``OSError``. The bounding set goes before the user does, while that is allowed; the other sets of capabilities are
    emptied by the kernel as the last of the numbers stops being 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "setuid programs cannot be held off (PR_SET_NO_NEW_PRIVS)")
    if user is None:
        return
    uid, gid, groups = user
    for capability in range(_LAST_CAPABILITY + 1):  # numbers that this kernel does not know are refused
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise OSError(0, f"the process is still {os.getresuid()}, {os.getresgid()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
