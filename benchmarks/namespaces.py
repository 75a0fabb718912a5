"""Two hosts on one machine: network namespaces joined by a pair of interfaces whose rate is limited. Linux, root, iproute2.

The namespaces have no names: each lasts as long as a process in it, here ``cat``, which ends when the pipe from this process
closes. So nothing is left, whatever ends this process, SIGKILL included: interfaces and their limits go with the namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

INTERFACE: Final = "eth0"
ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
"""Of the two hosts. Nobody else is in their network, and nothing leads out of it."""
_PROGRAMS: Final = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_QUEUE: Final = "50ms"  # what waits longer for its turn is dropped, as a switch does
_BURST_SECONDS: Final = 0.001
_LEAST_BURST: Final = 16 * 1024


class NoNamespaces(Exception):
    """This machine or this user cannot have them; the sentence says what is missing."""


class Link:
    """Hosts 0 and 1, and what lies between them. A context manager; raises ``NoNamespaces``."""

    def __init__(self) -> None:
        require()
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            for _ in ADDRESSES:
                self._holders.append(new_namespace())
            peer = str(self._holders[1].pid)
            do([*self.command(0), "ip", "link", "add", INTERFACE, "type", "veth", "peer", INTERFACE, "netns", peer])
            for host, address in enumerate(ADDRESSES):
                for words in (["link", "set", "lo", "up"], ["addr", "add", f"{address}/24", "dev", INTERFACE]):
                    do([*self.command(host), "ip", *words])
                do([*self.command(host), "ip", "link", "set", INTERFACE, "up"])
        except BaseException:
            self.close()
            raise

    def command(self, host: int) -> list[str]:
        """What to put before a command that shall run on ``host``; the process keeps its id, its parent and its descriptors."""
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--"]

    def limit(self, bits_per_second: int) -> None:
        """Let each host send no faster. The token bucket, which passes at once after a pause, holds a millisecond, or 16 KiB."""
        burst = max(_LEAST_BURST, int(bits_per_second / 8 * _BURST_SECONDS))
        words = ["rate", f"{bits_per_second}bit", "burst", str(burst), "latency", _QUEUE]
        for host in range(len(ADDRESSES)):
            do([*self.command(host), "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *words])

    def sent(self, host: int) -> int:
        """Bytes that ``host`` has sent so far, headers included."""
        lines = Path(f"/proc/{self._holders[host].pid}/net/dev").read_text().splitlines()
        found = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
        return int(found.partition(":")[2].split()[8])

    def close(self) -> None:
        """End the namespaces. What still runs in them keeps them."""
        for holder in self._holders:
            holder.communicate()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def require() -> None:
    """Raises ``NoNamespaces`` where programs or rights are missing."""
    missing = {name: package for name, package in _PROGRAMS.items() if shutil.which(name) is None}
    if missing:
        raise NoNamespaces(f"{', '.join(missing)} not found: install {', '.join(sorted(set(missing.values())))}")
    if os.geteuid() != 0:
        raise NoNamespaces("network namespaces and their limits are made by root: run it as root (sudo make bench ...)")


def new_namespace() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own, which ends when its standard input does. Raises ``NoNamespaces``."""
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which then ends them in order
    )
    assert holder.stdout is not None
    if not holder.stdout.readline():
        _, error = holder.communicate()
        raise NoNamespaces(f"no network namespace could be made: {error.decode().strip()} (CAP_SYS_ADMIN is needed)")
    return holder


def do(command: Sequence[str]) -> None:
    """Run a command of iproute2. Raises ``NoNamespaces`` when it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        words = " ".join(command[command.index("--") + 1 if "--" in command else 0 :])
        raise NoNamespaces(f"`{words}` failed: {done.stderr.strip()} (CAP_NET_ADMIN, and veth and tbf in the kernel?)")
