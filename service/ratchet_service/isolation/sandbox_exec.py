"""``python -I -S sandbox_exec.py FD COMMAND...``: execute COMMAND as another user and within limits (see ``sandbox``).

FD holds JSON: ``user`` (``[uid, gid, groups]``), ``limits`` by name, ``cwd``, and ``environ``, COMMAND's environment. A user,
limit or directory that is null stays as it is. Uses the standard library alone.
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
    """Apply the options in the descriptor ``argv[1]`` to this process, and replace it with ``argv[2:]``. Returns 126 if an option
    or the command fails with ``OSError``, which is printed."""
    with os.fdopen(int(argv[1])) as file:
        options: dict[str, Any] = json.load(file)
    command = argv[2:]
    try:
        _set_limits(options["limits"])
        _change_user(options["user"])
        if options["cwd"] is not None:
            os.chdir(options["cwd"])
        os.execve(command[0], command, options["environ"])
    except OSError as error:
        print(f"{command[0]}: {error.strerror or error}", file=sys.stderr)
    return 126


def _set_limits(limits: dict[str, int | None]) -> None:
    """Set this process's soft and hard limits, none above the hard limit that it has. None: unchanged."""
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


def _change_user(user: tuple[int, int, list[int]] | None) -> None:
    """Disable setuid programs for this process, and change it to ``user``, without capabilities. None: the user stays. Raises
    ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "setuid programs cannot be disabled (PR_SET_NO_NEW_PRIVS)")
    if user is None:
        return
    uid, gid, groups = user
    # While it is allowed: the kernel clears the other capability sets when the last of the user ids stops being 0.
    for capability in range(_LAST_CAPABILITY + 1):  # fails for numbers that this kernel does not know
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise OSError(0, f"the process is still {os.getresuid()}, {os.getresgid()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
