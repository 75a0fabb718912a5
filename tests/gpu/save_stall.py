"""Row ``save-stall``: what a save costs the training loop beside its steps, the first one and the others, and what a load takes;
in the same run a plain copy of the same tensors, ``torch.save`` and ``torch.load``. What is loaded must be what was saved."""

from __future__ import annotations

import json
import os
import signal
import statistics
from pathlib import Path
from typing import Any

from tests.gpu import service
from tests.gpu.work import Work
from tests.support.server import Server, rank_pid, wait_for


def run(work: Work) -> str:
    seen = {}
    with service.serving(work) as server:
        for staging in ("overlapped",) if work.size == "cheap" else ("overlapped", "blocking"):
            folder = work.folder / staging
            folder.mkdir()
            saves, load = _job(work, server, folder, staging)
            seen[staging] = _report(work, staging, saves, load)
    return "; ".join(f"{staging}: {words}" for staging, words in seen.items())


def _job(work: Work, server: Server, folder: Path, staging: str) -> tuple[dict[str, Any], dict[str, Any]]:
    every = work.sized(40, 12, 8)
    options = {
        "megabytes": work.sized(1000, 150, 3), "batch": work.sized(8192, 64, 8), "every": every, "saves": work.sized(3, 3, 2),
        "folder": folder,
    }  # fmt: skip
    spec = {
        **service.world(work), "name": f"save-stall-{staging}", "code": {"path": str(Path(__file__).with_name("job_code"))},
        "script": ["save_stall.py", *(word for name, value in options.items() for word in (f"--{name}", str(value)))],
        "world": {"ranks_per_node": 1, "device": work.device},
        "checkpoint": {"every_steps": every, "first": "off", "keep_last": 2, "staging": staging},
    }  # fmt: skip
    job_id = server.submit(spec)
    saves = _read(server, job_id, folder / "saves.json", work.left)
    found = server.newest_attempt(job_id)
    assert found is not None
    os.kill(rank_pid(found[1], 0), signal.SIGKILL)
    load = _read(server, job_id, folder / "load.json", work.left)
    server.call("POST", f"/v1/jobs/{job_id}/cancel")
    return saves, load


def _read(server: Server, job_id: str, file: Path, seconds: float) -> dict[str, Any]:
    def there() -> bool:
        assert server.job(job_id)["phase"] not in ("FAILED", "SUCCEEDED"), server.rank_logs(job_id)
        return file.exists()

    wait_for(there, f"{file.name}\n{server.rank_logs(job_id)}", seconds)
    return dict(json.loads(file.read_text()))


def _report(work: Work, staging: str, saves: dict[str, Any], load: dict[str, Any]) -> str:
    problems = []
    if not load["same"]:
        problems.append(f"what was loaded at step {load['step']} is not what was saved")
    if work.device == "cuda" and not saves["pinned"]:
        problems.append("the staging memory is not pinned")
    others, copy = statistics.median(saves["others"]), saves["copy"]
    pinned = "pinned staging" if saves["pinned"] else "staging in pageable memory"
    seen = (
        f"{saves['bytes'] / 1e6:.0f} MB, {pinned}; step {_ms(saves['usual'])}; stall of the first save {_ms(saves['first'])}, "
        f"of the others {_ms(others)} (plain copy {_ms(copy)}: {others / copy:.2f}x; torch.save {_ms(saves['torch.save'])}: "
        f"{others / saves['torch.save']:.3f}x); durable after {_ms(statistics.median(saves['durable']))}; load with every byte "
        f"verified {_ms(load['restore'])} (torch.load {_ms(load['torch.load'])}: {load['restore'] / load['torch.load']:.2f}x)"
    )
    work.judge(staging, problems, seen)
    return f"stall {_ms(others)}, {others / copy:.2f}x of a plain copy"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
