"""Specs and launches for the Kubernetes launcher's tests, as the service makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.protocol.messages import ForkSource, LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.launchers.kubernetes.launcher import KubernetesLauncher
from ratchet_service.launchers.kubernetes.settings import Site, parse_settings
from ratchet_service.launchers.launch_file import build_launch_file

HOME = HomePaths(Path("/var/lib/ratchet"))
JOB_ID = "job-0123456789ab"
SETTINGS = {
    "claim": "ratchet-home",
    "url": "http://ratchet-api:8000",
    "namespace": "ratchet",
    "image": "registry.example.com/ratchet-worker:cpu",
    "run_as_user": 10001,
    "run_as_group": 10001,
}
SMALL: dict[str, Any] = {"name": "digits", "task": {"entrypoint": "ratchet_worker.tasks.digits:DigitsTask"}}
WHOLE: dict[str, Any] = {
    "name": "large",
    "script": ["train.py"],
    "code": {"path": "/home/ada/project"},
    "start_from": {"path": "/home/ada/model.safetensors"},
    "image": "registry.example.com/team/train:2.1",
    "python": "/opt/venv/bin/python",
    "world": {"nodes": 2, "ranks_per_node": 4, "device": "cuda"},
    "resources": {"cpus_per_rank": 6, "memory": "256Gi", "gpu": "nvidia.com/gpu"},
    "secrets": {
        "WANDB_API_KEY": {"from_env": "WANDB_API_KEY"},
        "HF_TOKEN": {"from_secret": {"name": "hugging-face", "key": "token"}},
    },
    "volumes": [
        {"mount_path": "/data", "claim": "data", "sub_path": "imagenet"},
        {"mount_path": "/scratch", "empty_dir": "100Gi"},
        {"mount_path": "/etc/train", "config_map": "train"},
        {"mount_path": "/etc/pki/train", "secret": "pki"},
        {"mount_path": "/mnt/fast", "host_path": "/mnt/nvme", "read_only": False},
    ],
    "launcher": {
        "kind": "kubernetes",
        "queue": "team-vision",
        "priority_class": "training",
        "service_account": "ratchet-worker",
        "node_selector": {"node.example.com/pool": "a100"},
        "tolerations": [{"key": "example.com/night", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"team": "speech"}}}
                ]
            }
        },
        "topology_spread": [
            {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "queue_priority": "high",
        "queue_topology": {"required": "cloud.provider.com/topology-rack"},
        "image_pull_secrets": ["registry"],
        "shm_size": "64Gi",
        "labels": {"team": "vision"},
        "annotations": {"example.com/owner": "ada"},
        "ttl_seconds_after_finished": 600,
        "pod_patch": {
            "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"}},
            "spec": {
                "enableServiceLinks": None,
                "containers": [
                    {"name": "agent", "resources": {"limits": {"rdma/hca": "1"}, "requests": {"rdma/hca": "1"}}}
                ],
            },
        },
    },
}


def site(**settings: Any) -> Site:
    return parse_settings(HOME, SETTINGS | settings)


def launcher(environ: dict[str, str] | None = None, **settings: Any) -> KubernetesLauncher:
    return KubernetesLauncher(site(**settings), environ or {})


def spec_of(base: dict[str, Any] = SMALL, **changes: Any) -> JobSpec:
    """``launcher`` is merged, anything else replaced."""
    launcher = {"kind": "kubernetes"} | base.get("launcher", {}) | changes.pop("launcher", {})
    return parse_spec(base | changes | {"launcher": launcher})


def launch_of(spec: JobSpec, *, fork: bool = False, save_seconds: float = 0.0) -> LaunchFile:
    resolved = Resolved(
        device="cuda" if spec.resources.gpu else "cpu",
        backend="nccl" if spec.resources.gpu else "gloo",
        threads_per_rank=spec.resources.cpus_per_rank or 1,
        python=spec.python or "python",
        code_digest="c0de" * 16 if spec.code is not None else None,
        start_digest="5a17" * 16 if spec.start_from is not None else None,
    )
    made = build_launch_file(HOME, JOB_ID, 3, spec, resolved, (), token="not-shown", desired=Desired.RUN)
    source = ForkSource(job_root=str(HOME.job("job-ba9876543210").root), step=40, attempt=2, digest="d1")
    return made.model_copy(update={"save_seconds": save_seconds, "fork": source if fork else None})
