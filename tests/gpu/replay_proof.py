"""Row ``replay-proof``: a killed job proves the steps that it does again, one with a hidden generator does not; what a step's
fingerprint costs the loop, and that both ways to make one (hashed on the host, reduced on the device) see a flipped bit."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ratchet_worker.state.step_fingerprint import StepFingerprints
from tests.gpu import service
from tests.gpu.work import Work
from tests.support.server import Server

_LAG: Final = 2
"""Fingerprints that a GPU may not have given back when the rank is killed."""


def run(work: Work) -> str:
    with service.serving(work) as server:
        _judge(work, "nothing hidden", _killed(work, server), hidden=False)
        if work.size != "cheap":
            _judge(work, "a hidden generator", _killed(work, server, "--hidden"), hidden=True)
    return _cost(work)


def _killed(work: Work, server: Server, *words: str) -> dict[str, Any]:
    """The attempt behind the kill."""
    steps = work.sized(400, 60, 40)
    spec = {
        **service.world(work), "name": "replay-proof", "code": {"path": str(Path(__file__).with_name("job_code"))},
        "script": ["train.py", "--steps", str(steps), *words],
        "checkpoint": {"every_steps": work.sized(100, 20, 15), "first": "off"},
    }  # fmt: skip
    return service.finished(server, spec, work.sized(150, 30, 22), work.left).attempts[-1]


def _judge(work: Work, name: str, attempt: dict[str, Any], *, hidden: bool) -> None:
    redone, problems = attempt["redone"], []
    missing = redone["steps"] - redone["compared"]
    if redone["compared"] == 0 or missing > (_LAG if work.device == "cuda" else 0):
        problems.append(f"{redone['compared']} of {redone['steps']} redone steps were compared: {redone['reason']}")
    if hidden and redone["first_difference"] is None:
        problems.append("the hidden generator was not seen")
    if not hidden and redone["first_difference"] is not None:
        problems.append(attempt["proof"])
    work.judge(name, problems, attempt["proof"])


def _cost(work: Work) -> str:
    """Beside a loop of one process, with and without it by turns."""
    device = torch.device(work.device)
    width, depth = work.sized(2048, 512, 64), 8
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).to(device)
    fingerprints, batch = StepFingerprints([*model.parameters()], device), torch.randn(32, width, device=device)
    host: list[float] = []
    blocks: dict[bool, list[float]] = {True: [], False: []}
    for number in range(work.sized(200, 20, 4)):
        for made in (True, False) if number % 2 else (False, True):
            begin = time.perf_counter()
            for step in range(10):
                model(batch).square().mean().backward()
                model.zero_grad()
                if made:
                    before = time.perf_counter()
                    fingerprints.record_step(10 * number + step, (0, step))
                    host.append(time.perf_counter() - before)
            if device.type == "cuda":
                torch.cuda.synchronize()
            blocks[made].append((time.perf_counter() - begin) / 10)
    with_it, without = statistics.median(blocks[True]), statistics.median(blocks[False])
    seen = (
        f"{statistics.median(host) * 1e6:.0f} us of the loop's thread, {(with_it - without) * 1e6:+.0f} us of a step of "
        f"{without * 1e3:.1f} ms; {len(fingerprints.plan.chunks)} chunks of {fingerprints.plan.chunk_bytes >> 10} KiB"
    )
    work.judge("cost", _blind(device), seen)
    return seen


def _blind(device: torch.device) -> list[str]:
    problems = []
    for on_device in (True,) if device.type == "cuda" else (False, True):
        weight = torch.randn(64, 64, device=device)
        fingerprints = StepFingerprints([weight], device, on_device=on_device)
        before = [*fingerprints.record_step(1, (0, 1)), *fingerprints.drain()]
        weight.view(torch.int32)[5, 7] ^= 1
        if [*fingerprints.record_step(1, (0, 1)), *fingerprints.drain()] == before:
            problems.append(f"a flipped bit was not seen ({'on the device' if on_device else 'on the host'})")
    return problems
