"""A service that starts jobs on a cluster: a real Slurm of two nodes, a modelled Kubernetes; and on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.engines import STRANGER
from tests.support.kube.cluster import Cluster
from tests.support.server import Server
from tests.support.slurm import Slurm, slurm_cluster
from tests.support.tcp_proxy import TcpProxy


@contextmanager
def on_slurm(folder: Path, node_timeout: int = 60) -> Iterator[tuple[Server, Slurm]]:
    """``node_timeout``: seconds after which Slurm gives up a node that does not answer."""
    launchers = folder / "launchers.json"
    launchers.write_text(json.dumps({"local": {}, "slurm": {"poll_seconds": 0.3, "file_seconds": 2}}))
    server = Server(folder / "home", "--launchers", str(launchers))
    with slurm_cluster(node_timeout=node_timeout) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.variables.items():
            patch.setenv(name, value)
        try:
            yield server.start(), cluster
        finally:
            server.stop()


@contextmanager
def on_kubernetes(folder: Path) -> Iterator[tuple[Server, Cluster]]:
    """Its pods run as the user ``STRANGER`` where the tests run as root."""
    home, launchers = folder / "home", folder / "launchers.json"
    server = Server(home, "--launchers", str(launchers))
    with TcpProxy(lambda: server.url) as relay, Cluster(folder / "cluster", claims={"home": home}) as cluster:
        settings = {"claim": "home", "url": relay.url, "kubeconfig": str(cluster.kubeconfig), "image": "worker:1"}
        if os.getuid() == 0:
            settings |= {"run_as_user": STRANGER, "run_as_group": STRANGER}
        launchers.write_text(json.dumps({"local": {}, "kubernetes": settings}))
        try:
            yield server.start(), cluster
        finally:
            server.stop()
