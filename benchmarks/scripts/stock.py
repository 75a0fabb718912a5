"""torch's own hooks in a loop that is written by hand: what Ratchet's are measured against. Only torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

After = Callable[[], object]
"""What a loop does after every optimizer step, while there are gradients: torch averages no parameter without."""

ONE_BUCKET: Final = 1024  # MiB of bucket_cap_mb


def bf16_compress(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types, not names
    """torch's, under another name than the one that DDP refuses without NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


_FUNCTIONS: Final[dict[str, Any]] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
    "bf16_compress": bf16_compress,
    "powerSGD": powerSGD_hook.powerSGD_hook,
    "batched_powerSGD": powerSGD_hook.batched_powerSGD_hook,
    "noop": debugging_hooks.noop_hook,
}
"""By hook, as Ratchet's registry names it. Not here: quantization, whose hooks fail on gloo (they read the result of an
all-gather as NCCL gives it)."""


def register(
    model: DistributedDataParallel, name: str, *, wrapper: str | None = None, waits: bool = False, **settings: Any
) -> After:
    """torch's hook of that name, with a spec's ``settings``. ``waits``: each bucket is waited for inside the hook, without which
    torch's PowerSGD crosses its all-reduces on gloo where there are several buckets, and the process aborts."""
    if name == "post_localSGD":
        return _post_local_sgd(model, **settings)
    function = _FUNCTIONS[name]
    if wrapper is not None:
        function = getattr(default_hooks, wrapper)(function)
    state = powerSGD_hook.PowerSGDState(None, **settings) if name.endswith("powerSGD") else None
    model.register_comm_hook(state, _waiting(function) if waits else function)
    return _nothing


def mend_batched_powersgd() -> None:
    """torch's fails at its first compressed step, where it orthonormalises matrices that are no batch; here as a batch of one."""
    torchs: Any = powerSGD_hook._orthogonalize

    def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
        torchs(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

    powerSGD_hook._orthogonalize = orthogonalize


def _nothing() -> None:
    """Most hooks leave nothing to do after a step."""


def _waiting(function: Any) -> Any:
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(function(state, bucket).wait())
        return future

    return hook


def _post_local_sgd(
    model: DistributedDataParallel, start_localSGD_iter: int, subgroup_size: int, model_averaging_period: int
) -> After:
    if subgroup_size != 1:
        raise ValueError("subgroups of one rank")
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    state = post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=model_averaging_period, warmup_steps=start_localSGD_iter)
    return lambda: averager.average_parameters(model.parameters())
