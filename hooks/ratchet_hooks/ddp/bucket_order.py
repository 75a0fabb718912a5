"""Compute, from a recorded bucket layout, an order of parameters from which torch rebuilds it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ratchet_hooks.errors import LayoutMismatch
from ratchet_hooks.torch_compat import assign_buckets


def order_for(
    recorded: list[list[str]], parameters: Sequence[torch.nn.Parameter], names: Sequence[str], limits: Sequence[int]
) -> list[int]:
    """Return the indices of ``parameters`` in an order from which DDP's rebuild makes the layout ``recorded``. ``limits``: bytes
    of the first bucket, and of each further bucket. Raises ``LayoutMismatch`` if no order is found for several dtypes. With a
    single dtype the order is not checked: the caller must compare the layout that DDP makes with ``recorded``."""
    index = {name: i for i, name in enumerate(names)}
    wanted = [[index[name] for name in bucket] for bucket in recorded]
    dtypes = dict.fromkeys(parameters[bucket[0]].dtype for bucket in wanted)
    # Buckets contain one dtype each and fill up in parallel. Those that stay below their limit come last, in an order that
    # depends on which dtype came first. With one dtype, the caller compares the layout that DDP makes.
    for order in itertools.permutations(dtypes):
        trial = _with_dtype_order(order, wanted, parameters)
        if len(order) == 1 or assign_buckets([parameters[i] for i in trial], limits, trial) == wanted:
            return trial
    raise LayoutMismatch(
        recorded[0][0], "the recorded bucket layout cannot be rebuilt here; bucket_cap_mb or a dtype has changed"
    )


def _with_dtype_order(
    order: Sequence[torch.dtype], target_buckets: list[list[int]], parameters: Sequence[torch.nn.Parameter]
) -> list[int]:
    """Return the parameters' indices bucket by bucket. Some parameters are moved forward, so that the dtypes first occur in the
    order ``order``."""
    first: dict[torch.dtype, int] = {}
    for bucket in target_buckets:
        first.setdefault(parameters[bucket[0]].dtype, bucket[0])
    out: dict[int, None] = {}  # a dictionary keeps the order
    waiting = list(order)
    for bucket in target_buckets:
        while parameters[bucket[0]].dtype in waiting:
            out[first[waiting.pop(0)]] = None
        out |= dict.fromkeys(bucket)
    return list(out)
