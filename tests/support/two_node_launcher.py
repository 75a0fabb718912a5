"""Two nodes on this machine for tests: the launcher ``twin``, and network namespaces for its nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.namespaces import NoNamespaces, do, new_namespace, require

PLUGIN = Path(__file__).with_name("plugin")


def spec(data: Mapping[str, Any]) -> dict[str, Any]:
    """The job of ``data``, on two nodes with a rank each."""
    world = {**data["world"], "nodes": 2, "ranks_per_node": 1}
    return {**data, "world": world, "launcher": {"kind": "twin"}}


def environment_with_plugin(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environ`` with the launcher's package on the path."""
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(PLUGIN), environ.get("PYTHONPATH")]))}


def launchers_file(path: Path, behind: Sequence[Sequence[str]] = ((), ()), **settings: Any) -> Path:
    """A launchers file with ``local`` and ``twin``; ``behind``, ``settings``: see the plug-in."""
    twin = {"behind": [list(words) for words in behind], **settings}
    path.write_text(json.dumps({"local": {}, "twin": twin}))  # YAML, too
    return path


class Hosts:
    """Two hosts, a switch, and this machine on it: four namespaces, the last being the one that we run in. A context manager;
    raises ``NoNamespaces``. All of it goes with this process, whatever ends that."""

    def __init__(self) -> None:
        require()
        self._stack = ExitStack()
        unique = os.getpid()  # several test processes beside one another
        self._net = f"10.{128 + unique % 100}.{unique // 100 % 250}"
        self.interface = "fabric0"
        self._uplink = f"rt{unique}"
        try:
            self._switch = self._namespace()
            self._hosts = [self._namespace() for _ in range(2)]
            self._join()
        except BaseException:
            self.close()
            raise

    @property
    def local_address(self) -> str:
        """This machine's address on the switch."""
        return f"{self._net}.254"

    def address(self, host: int) -> str:
        return f"{self._net}.{host + 1}"

    def command(self, host: int) -> list[str]:
        """What to put before a command that shall run on ``host``."""
        return _nsenter_command(self._hosts[host])

    def disconnect(self, host: int) -> None:
        """Take the host's cable out."""
        do([*_nsenter_command(self._switch), "ip", "link", "set", f"p{host}", "down"])

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _namespace(self) -> subprocess.Popen[bytes]:
        made = new_namespace()
        self._stack.callback(made.communicate)
        return made

    def _join(self) -> None:
        switch = str(self._switch.pid)
        _run_ip(self._switch, "link add br0 type bridge", "link set br0 up")
        for number, host in enumerate(self._hosts):
            port = f"p{number}"
            _run_ip(host, f"link add {self.interface} type veth peer {port} netns {switch}", "link set lo up")
            _run_ip(host, f"addr add {self.address(number)}/24 dev {self.interface}", f"link set {self.interface} up")
            _run_ip(self._switch, f"link set {port} master br0", f"link set {port} up")
        for words in (
            f"link add {self._uplink} type veth peer uplink netns {switch}",
            f"addr add {self.local_address}/24 dev {self._uplink}",
            f"link set {self._uplink} up",
        ):
            do(["ip", *words.split()])
        _run_ip(self._switch, "link set uplink master br0", "link set uplink up")


def _nsenter_command(namespace: subprocess.Popen[bytes]) -> list[str]:
    return [shutil.which("nsenter") or "", f"--net=/proc/{namespace.pid}/ns/net", "--"]


def _run_ip(namespace: subprocess.Popen[bytes], *commands: str) -> None:
    for words in commands:
        do([*_nsenter_command(namespace), "ip", *words.split()])


__all__ = ["PLUGIN", "Hosts", "NoNamespaces", "environment_with_plugin", "launchers_file", "spec"]
