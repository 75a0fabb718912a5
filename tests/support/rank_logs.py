"""Logs of ranks that never ran, looked after as an agent does."""

from __future__ import annotations

from pathlib import Path

from ratchet_contract.paths import AttemptPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import Resolved
from ratchet_contract.spec.parse import parse_spec
from ratchet_worker.agent.log_limits import LogKeeper


def log_keeper(paths: AttemptPaths, log_bytes: int = 1 << 20, ranks: int = 1) -> LogKeeper:
    """Of an attempt with ``ranks`` ranks on one node; its logs' directory is there."""
    paths.log(0).parent.mkdir(parents=True, exist_ok=True)
    spec = parse_spec({"name": "t", "task": {"entrypoint": "a.b:C"}, "world": {"ranks_per_node": ranks}})
    launch = LaunchFile(
        job_id="job-0123456789ab",
        attempt=1,
        world_size=ranks,
        ranks=list(range(ranks)),
        spec=spec,
        resolved=Resolved(device="cpu", backend="gloo", threads_per_rank=1, python="python"),
        job_root=str(paths.root.parent.parent),
        attempt_dir=str(paths.root),
        workdir=str(paths.root / "work"),
        report_token="none",
        service_file="/nowhere",
        log_bytes=log_bytes,
    )
    return LogKeeper(launch, paths)


def write(path: Path, text: str) -> None:
    """As a rank does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        handle.write(text)
