"""A node's container engine: runs the processes that it is told to, and ends them all when whoever told it is gone.

``python -S -E pod_processes.py``; standard library only. Lines of JSON come in by standard input (``start``: id, argv, env, cwd,
log, root, binds, user, group; ``signal``: id, signal), lines of JSON go out (isolates; id and pid, error or exit). A container
ends with its first process, as its namespace would: what carries its id in the environment is killed then. When standard input
ends, so does all.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import select
import signal
import time

MARK = "FAKE_POD_UID"
_PDEATHSIG, _SUBREAPER = 1, 36  # linux/prctl.h
_NEWNS, _NEWUSER = 0x00020000, 0x10000000  # linux/sched.h
_READ_ONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18  # linux/mount.h
_libc = ctypes.CDLL(None, use_errno=True)


class Engine:
    def __init__(self):
        self.pids = {}  # of containers' first processes, to their ids
        self.wake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        write_event(isolates=can_isolate())
        _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # what a container leaves behind becomes this process's

    def run(self):
        buffer = b""
        while True:
            readable, _, _ = select.select([0, self.wake], [], [])
            if 0 in readable:
                data = os.read(0, 65536)
                if not data:
                    break
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self.execute(json.loads(line))
            if self.wake in readable:
                os.read(self.wake, 4096)
            self.reap()
        for uid in set(self.pids.values()) | {""}:
            sweep(uid)

    def execute(self, order):
        uid, what = order["id"], order["op"]
        pid = next((pid for pid, known in self.pids.items() if known == uid), None)
        if what == "start":
            self.start(order)
        elif pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, order["signal"])

    def start(self, order):
        parent = os.getpid()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                enter_container(order, parent)
            except BaseException as error:
                os.write(write, str(error).encode())
            os._exit(127)
        os.close(write)
        fault = os.read(read, 4096).decode()  # empty: the pipe was closed by the new program's start
        os.close(read)
        if fault:
            os.waitpid(pid, 0)
            write_event(id=order["id"], error=fault)
        else:
            self.pids[pid] = order["id"]
            write_event(id=order["id"], pid=pid)

    def reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            uid = self.pids.pop(pid, None)
            if uid is not None:
                sweep(uid)
                code = os.waitstatus_to_exitcode(status)
                write_event(id=uid, exit=code if code >= 0 else 128 - code)


def can_isolate():
    """May a process have mounts of its own here?"""
    pid = os.fork()
    if pid == 0:
        try:
            unshare_mounts()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def enter_container(order, parent):
    """Turn this process into the container's first one."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    null, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if order["root"]:
        unshare_mounts()
        build_root(order["root"], order["binds"])
        os.chroot(order["root"])
    os.chdir(order["cwd"] or "/")
    if os.geteuid() == 0 and order["user"]:
        os.setgroups([])
        os.setgid(order["group"])
        os.setuid(order["user"])
    _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # last: it is forgotten when the user changes
    if os.getppid() != parent:
        os._exit(127)
    os.execvpe(order["argv"][0], order["argv"], order["env"] | {MARK: order["id"]})


def unshare_mounts():
    """A mount namespace of this process's own; who is not root needs a namespace of users for it, and stays who they are."""
    user, group, flags = os.getuid(), os.getgid(), _NEWNS
    if user != 0:
        flags |= _NEWUSER
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "no mount namespace: " + os.strerror(ctypes.get_errno()))
    if user != 0:
        pathlib.Path("/proc/self/setgroups").write_text("deny")
        pathlib.Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        pathlib.Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    mount("none", "/", _REC | _PRIVATE)


def build_root(root, binds):
    """A root directory that shows this machine's, without what only root sees and without /tmp, and then what is bound."""
    mount(root, root, _BIND)
    for entry in pathlib.Path("/").iterdir():
        place = pathlib.Path(root, entry.name)
        if entry.is_symlink():
            place.symlink_to(entry.readlink())
        elif entry.is_dir():
            place.mkdir(0o755)
            if entry.name != "tmp" and entry.stat().st_mode & 0o005 == 0o005:
                mount(str(entry), str(place), _BIND | _REC)
    pathlib.Path(root, "tmp").chmod(0o777)
    for source, place, read_only in binds:
        pathlib.Path(root + place).mkdir(parents=True, exist_ok=True)
        mount(source, root + place, _BIND | _REC)
        if read_only:
            mount("none", root + place, _BIND | _REMOUNT | _READ_ONLY)


def mount(source, place, flags):
    if _libc.mount(source.encode(), place.encode(), None, flags, None) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount {source} at {place}: {os.strerror(ctypes.get_errno())}")


def sweep(uid):
    """Kill every process of the container (of every container: ``""``), until there is none."""
    needle = f"{MARK}={uid}".encode()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        found = False
        for process in pathlib.Path("/proc").iterdir():
            if not process.name.isdigit() or int(process.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                marked = any(
                    v == needle or (not uid and v.startswith(needle))
                    for v in (process / "environ").read_bytes().split(b"\0")
                )
                if marked and belongs(int(process.name)) and state(process) not in "ZX":
                    os.kill(int(process.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.005)


def belongs(pid):
    """Is it a descendant of this process? (Tests run side by side.)"""
    while pid > 1:
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if pid == os.getpid():
            return True
    return False


def state(process):
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def write_event(**message):
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    _libc.prctl(_PDEATHSIG, 0, 0, 0, 0)
    Engine().run()
