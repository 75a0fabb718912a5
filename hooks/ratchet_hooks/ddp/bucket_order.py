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
    """Return the indices of ``parameters`` in an order from which DDP's rebuild makes the layout ``recorded``. ``names``: the
    names of ``parameters``, in the same order; ``limits``: bytes of the first bucket and of further ones.

    Buckets contain one dtype each and fill up in parallel. Those that stay below their limit come last, in an order that
    depends on which dtype came first, so every order of the dtypes is tried with torch's own function. Raises
    ``LayoutMismatch`` if no order gives the recorded layout (another ``bucket_cap_mb``, other shapes). With only one dtype the
    order is returned without a trial, and nothing is raised; the caller compares the layout that DDP makes.
    """
    index = {name: i for i, name in enumerate(names)}
    wanted = [[index[name] for name in bucket] for bucket in recorded]
    dtypes = dict.fromkeys(parameters[bucket[0]].dtype for bucket in wanted)
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
    """Return the parameters' indices bucket by bucket, changed so that the dtypes first occur in the order ``order``. Where
    needed, the first parameter of a dtype is moved forward, as little as possible, since a bucket of one parameter may be
    full."""
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
