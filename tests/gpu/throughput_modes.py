"""Steps per second of each model under one mode of determinism: ``python -m tests.gpu.throughput_modes MODE DEVICE SIZE SECONDS``

Prints a line of JSON per model: ``steps_per_second``; ``refused``: what torch said of operations without a deterministic kernel;
``warned``: the same under ``warn``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from typing import Any, Final

import torch

from ratchet_worker.host import determinism
from tests.gpu.models import Subject, loss_of, subjects

_WARM_UP: Final = 3
_BLOCKS: Final = 5


def main() -> None:
    mode, device, size, seconds = sys.argv[1:]
    determinism.apply(mode, 1)  # type: ignore[arg-type]
    place = torch.device(device)
    for name, subject in subjects(size == "full").items():
        print(json.dumps({"model": name, **measure(subject, place, float(seconds))}), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()


def measure(subject: Subject, device: torch.device, seconds: float) -> dict[str, Any]:
    """Blocks of steps for about ``seconds``. Where the loss of images is refused, once more with pixels as rows."""
    out: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for flat in (False, True):
            try:
                out["steps_per_second"] = _timed(subject, device, seconds, flat)
                break
            except RuntimeError as error:
                if "deterministic" not in str(error):
                    raise
                out.setdefault("refused", []).append(str(error).partition("\n")[0][:200])
    out["warned"] = sorted(
        {str(one.message).partition("\n")[0][:200] for one in said if "deterministic" in str(one.message)}
    )
    return out


def _timed(subject: Subject, device: torch.device, seconds: float, flat: bool) -> float:
    torch.manual_seed(0)
    model = subject.make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, target = subject.batch(device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(model(inputs).float(), target, flat=flat)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def block(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    block(_WARM_UP)
    count = max(1, round(seconds / _BLOCKS / block(1)))
    return count / statistics.median(block(count) for _ in range(_BLOCKS))


if __name__ == "__main__":
    main()
