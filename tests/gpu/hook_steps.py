"""Row ``hook-steps``: a step under each of Ratchet's hooks beside the same step under torch's own, as ``make bench ONLY=hooks``
has it for the CPU. On a GPU one rank over NCCL: what is compared is the hooks' own kernels. On the CPU two ranks over gloo.

Nothing here is red but a hook that fails: how quick they are, the table says.
"""

from __future__ import annotations

import statistics
from typing import Any, Final

from benchmarks.stats import estimate
from tests.gpu.work import Work
from tests.support.gloo_ranks import Named, RankFailure, Ranks

_RUNS: Final[Any] = Named("tests.gpu.hook_steps_runs")
HOOKS: Final = (
    "allreduce", "fp16_compress", "bf16_compress", "powerSGD", "batched_powerSGD", "post_localSGD",
    "allreduce + fp16_compress_wrapper", "powerSGD + fp16_compress_wrapper",
)  # fmt: skip


def run(work: Work) -> str:
    hooks = HOOKS if work.size != "cheap" else ("powerSGD",)
    width, depth, block = work.sized(4096, 512, 32), work.sized(8, 4, 2), work.sized(5, 5, 1)
    pairs = work.sized(20, 10, 2)
    world, backend = (1, "nccl") if work.device == "cuda" else (2, "gloo")
    seen = []
    ranks = Ranks(world, deadline=60.0, backend=backend)
    try:
        for hook in hooks:
            ranks = ranks if ranks.alive else Ranks(world, deadline=60.0, backend=backend)
            try:
                found = ranks.run(_RUNS.blocks, hook, work.device, width, depth, block, pairs)[0]
            except RankFailure as failure:
                work.red(hook, str(failure))
                continue
            ratio, control = (_ratio(found, kind) for kind in ("managed", "control"))
            step = statistics.median(found["managed"]) / block * 1e3
            work.green(hook, f"{ratio} of torch's; {step:.2f} ms; control {control}")
            seen.append(f"{hook} {estimate(_ratios(found, 'managed')).median:.2f}x")
    finally:
        ranks.close(clean=ranks.alive)
    return f"a step / torch's, {world} rank{'s' * (world > 1)} over {backend}: {', '.join(seen)}"


def _ratio(found: dict[str, list[float]], kind: str) -> str:
    return str(estimate(_ratios(found, kind)))


def _ratios(found: dict[str, list[float]], kind: str) -> list[float]:
    return [a / b for a, b in zip(found[kind], found["stock"], strict=True)]
