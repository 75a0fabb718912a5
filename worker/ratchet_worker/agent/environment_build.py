"""The process that installs a job's requirements: ``python -P -m ratchet_worker.agent.environment_build``, with an ``Order`` as
JSON on its standard input. It runs as the job's user, without the service's variables. On its standard output it writes why the
build is not confined, or nothing; all other output is on its standard error.

Packages run code while they are built. So, where the kernel permits it, the build runs in namespaces of its own. Then it sees no
other process, can write only to the environment's directory and to a temporary directory, and does not see the run directory."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import resource
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from ratchet_contract.doctor.installed_packages import DISTRIBUTION, required_packages
from ratchet_contract.version import RATCHET_VERSION
from ratchet_worker.ipc.child_processes import die_with_parent

_NEW_NAMESPACES: Final = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000  # user, mount, pid, ipc
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_KEPT_FLAGS: Final = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of a mount that a user namespace may not clear: as statvfs(3) names them -> as mount(2) does."""
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _LAST_CAPABILITY = 38, 24, 63
INCOMPLETE: Final = 3
"""Exit code if pip succeeded, but the environment cannot run Ratchet."""
_CHECK: Final = """
import sys
from ratchet_contract.doctor.installed_packages import required_packages
bad = [p for extra in (None, "worker") for p in required_packages(extra) if not p.is_satisfied]
print(*(f"{p.name} {p.installed} does not satisfy Ratchet's {p.name}{p.required}" for p in bad), sep="\\n")
sys.exit(bool(bad))
"""


class Order(BaseModel):
    """What to build. ``parent``: pid of the agent. ``hidden``: the run directory. ``versions``: constraints, ``NAME==VERSION``.
    ``memory``, ``open_files``: limits of the job for each process, in bytes and in number; None: none."""

    parent: int
    directory: Path
    tmp: Path
    hidden: Path
    requirements: list[str]
    versions: list[str]
    memory: int | None
    open_files: int | None


def base_directories() -> list[str]:
    """Return the directories in which this interpreter's own packages are."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [path for path in [*user, *site.getsitepackages()] if Path(path).is_dir()]


def describe_base() -> str:
    """Return a text that changes with this interpreter and with the packages that are installed for it."""
    suffixes = (".dist-info", ".egg-info", ".pth")
    found = [
        str(entry) for folder in base_directories() for entry in Path(folder).iterdir() if entry.suffix in suffixes
    ]
    return repr([sys.version, sysconfig.get_platform(), sys.prefix, sorted(found)])


def main() -> int:
    """Build the environment and return the exit code."""
    order = Order.model_validate_json(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    report = os.dup(1)  # programs that this process starts do not get it
    os.dup2(2, 1)
    die_with_parent(order.parent)
    for kind, limit in ((resource.RLIMIT_DATA, order.memory), (resource.RLIMIT_NOFILE, order.open_files)):
        if limit is not None:
            resource.setrlimit(kind, (limit, limit))
    why, code = _run_confined(order, partial(_build, order))
    if code is not None:
        return code
    os.write(report, why.encode())
    return _build(order)


def _build(order: Order) -> int:
    """Create the environment and install the requirements; return the exit code."""
    venv.EnvBuilder(symlinks=True).create(order.directory)
    python = order.directory / "bin" / "python"
    folder = order.directory / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # behind the environment's own packages; addsitedir also reads the .pth files there, as of an editable installation
    lines = [f"import site; site.addsitedir({path!r})\n" for path in base_directories()]
    (folder / "ratchet-base.pth").write_text("".join(lines), encoding="utf-8")
    requirements, constraints = order.tmp / "requirements.txt", order.tmp / "constraints.txt"
    requirements.write_text("\n".join(order.requirements) + "\n", encoding="utf-8")
    needed = [p for extra in (None, "worker") for p in required_packages(extra)]
    own = [f"{DISTRIBUTION}=={RATCHET_VERSION}", *(f"{p.name}{p.required}" for p in needed), *order.versions]
    constraints.write_text("\n".join(own) + "\n", encoding="utf-8")
    if importlib.util.find_spec("pip") is None and (code := _run([python, "-P", "-m", "ensurepip"], order)):
        return code
    pip = [python, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--progress-bar", "off"]
    if code := _run([*pip, "-r", requirements, "-c", constraints], order):
        return code
    return INCOMPLETE if _run([python, "-P", "-c", _CHECK], order) else 0


def _run(command: Sequence[object], order: Order) -> int:
    """Run a command in the temporary directory, and return its exit code. It ends with this process."""
    # preexec_fn: this process has one thread
    ends = partial(die_with_parent, os.getpid())
    return subprocess.run([str(word) for word in command], cwd=order.tmp, preexec_fn=ends, check=False).returncode


def _run_confined(order: Order, work: Callable[[], int]) -> tuple[str, int | None]:
    """Run ``work`` in a child process that is confined, and return its exit code, or why the system does not permit this."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            code = _in_namespaces(order, work, writing)
        except OSError as error:
            os.write(writing, f"{error.filename or ''}: {error.strerror}".encode())
            code = 1
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        why = report.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return why, None if why else code


def _in_namespaces(order: Order, work: Callable[[], int], report: int) -> int:
    """Enter new namespaces of users, mounts, processes and IPC, and run ``work`` in a child there; return its exit code. Raises
    ``OSError`` before the child is started. ``report``: the descriptor to write why the child cannot be confined."""
    die_with_parent(os.getppid())
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEW_NAMESPACES)
    for name, text in (("uid_map", f"{uid} {uid} 1"), ("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    _restrict_mounts(order)
    child = os.fork()
    if child:
        os.close(report)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF
    try:
        die_with_parent(0)  # the parent is outside of the namespace
        _mount("proc", "/proc", "proc", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for capability in range(_LAST_CAPABILITY + 1):  # of what this process starts, root's too
            ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    except OSError as error:
        os.write(report, f"{error.filename or ''}: {error.strerror}".encode())
        os._exit(1)
    os.close(report)
    code = 1
    try:
        code = work()
    finally:
        sys.stdout.flush()
        os._exit(code & 0xFF)


def _restrict_mounts(order: Order) -> None:
    """Make all file systems read-only in this mount namespace, except the directories to write to, and hide the run directory.
    Raises ``OSError``."""
    _mount(None, "/", None, _REC | _PRIVATE)
    writable = [order.directory, order.tmp]
    read = {Path(sys.prefix), Path(sys.base_prefix), *map(Path, base_directories())}
    kept = [*writable, *(path for path in sorted(read) if path.is_relative_to(order.hidden))]
    descriptors = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in kept]
    _mount("tmpfs", str(order.hidden), "tmpfs", _NOSUID | _NODEV)
    for path, descriptor in zip(kept, descriptors, strict=True):
        path.mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", str(path), None, _BIND | _REC)
        os.close(descriptor)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), line.split(" ")[4])
        if Path(point) in writable:
            continue
        try:
            flags = os.statvfs(point).f_flag
            _mount(None, point, None, _REMOUNT | _BIND | _RDONLY | sum(f for s, f in _KEPT_FLAGS.items() if flags & s))
        except (FileNotFoundError, PermissionError):
            if os.access(point, os.W_OK):  # else nothing can be written there either
                raise


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    """Call mount(2). Raises ``OSError``."""
    _call("mount", source and source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None,
          what=f"mount {target}")  # fmt: skip


def _call(function: str, *arguments: Any, what: str | None = None) -> None:
    """Call a function of the C library that returns 0 if it succeeds. Raises ``OSError``, with ``what`` as its file name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what or function)


if __name__ == "__main__":
    sys.exit(main())
