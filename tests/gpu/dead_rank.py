"""Row ``dead-rank``: of two ranks one is killed with SIGKILL. The survivor aborts its communicators before the agent ends it, as
its log says, and nothing of the attempt is left: no process, no memory of the GPU."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any, Final

from tests.gpu import service
from tests.gpu.runner import processes_of
from tests.gpu.work import Work
from tests.support.server import Server, rank_pid, wait_for

_ABORTED: Final = re.compile(r"aborted ([1-9]\d*) process groups before the end")  # ratchet_worker.ipc.group_abort
_PATIENCE: Final = 20.0
"""Seconds for the agent to end after its last report, and for the driver to free what a killed process had."""
_KEPT: Final = 64 << 20
"""Bytes that a driver may keep for itself behind its first client."""


def run(work: Work) -> str:
    gpus = _gpus(work)
    with service.serving(work, twin=True) as server:
        seen = [_case(work, server, "gloo, two ranks on one device", "computes", service.world(work, shared=True))]
        if gpus >= 2:
            local = service.world(work) | {"world": {"ranks_per_node": 2, "device": "cuda"}}
            seen.append(_case(work, server, "NCCL, a GPU per rank", "waits", local))
        else:
            what = (
                "one GPU bears one rank of NCCL, and a survivor needs a second"
                if gpus
                else "NCCL moves CUDA tensors only"
            )
            work.exclude("NCCL, a GPU per rank", what)
    return "; ".join(seen)


def _case(work: Work, server: Server, name: str, survivor: str, parts: dict[str, Any]) -> str:
    code = Path(__file__).with_name("job_code")
    width = work.sized(4096, 128, 16)
    spec = {
        **parts, "name": "dead-rank", "code": {"path": str(code)},
        "script": ["dead_rank.py", "--rank-0", survivor, "--width", str(width)],
        "checkpoint": {"every_steps": 50}, "policy": {"max_failures": 0},
    }  # fmt: skip
    free = _free_memory(work)
    job_id = server.submit(spec)
    _, paths = server.wait_step(job_id, 2, deadline=work.left)
    logs = [paths.log(rank) for rank in range(2)]
    wait_for(
        lambda: all("apart from" in log.read_text() for log in logs), "both ranks to be in the third step", work.left
    )
    taken = free - _free_memory(work)
    os.kill(rank_pid(paths, 1), signal.SIGKILL)
    killed = time.monotonic()
    wait_for(
        lambda: server.job(job_id)["phase"] == "FAILED", f"the job to fail\n{server.rank_logs(job_id)}", work.left, 0.05
    )
    ended = time.monotonic() - killed
    problems, causes = [], [attempt["cause"] for attempt in server.attempts(job_id)]
    if causes != ["rank-killed"]:
        problems.append(f"attempts ended as {causes}")
    if (aborted := _ABORTED.search(log := logs[0].read_text(errors="replace"))) is None:
        problems.append(f"the survivor's log does not say that it aborted its communicators; its end: {log[-300:]!r}")
    end = time.monotonic() + _PATIENCE
    while (
        (left := processes_of(paths.root)) or (lost := free - _free_memory(work)) > _KEPT
    ) and time.monotonic() < end:
        time.sleep(0.1)
    if left:
        problems.append(f"processes {left} are left")
    elif lost > _KEPT:
        problems.append(f"{lost} bytes of the GPU are not free again")
    memory = f", {taken / 1e6:.0f} MB of the GPU free again" if work.device == "cuda" else ""
    groups = int(aborted[1]) if aborted else 0
    seen = f"the survivor aborted {groups} process groups; the job ended {ended:.1f} s after the kill, no process left{memory}"
    work.judge(name, problems, seen)
    return f"{name}: {'not as it should be' if problems else 'aborted, nothing left'}"


def _gpus(work: Work) -> int:
    if work.device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _free_memory(work: Work) -> int:
    """Bytes of the first GPU; this process's own part of it is there from the first call on."""
    if work.device == "cpu":
        return 0
    import torch

    return int(torch.cuda.mem_get_info(0)[0])
