"""Spec model of post-local SGD. Torch-free."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from ratchet_hooks.checked_dataclass import option
from ratchet_hooks.specs.base import HookSpecBase, Wrapper, wrapper_option


@dataclass(frozen=True, kw_only=True)
class PostLocalSGDSpec(HookSpecBase):
    """Post-local SGD (Lin et al., arXiv 1808.07217): all-reduce over all ranks until ``start_localSGD_iter``, then over subgroups
    only, with the parameters averaged over all ranks every few steps.

    The parameters of ``PostLocalSGDState`` and of torch's averagers; the averager's warm-up always ends with the hook's.
    """

    name: Literal["post_localSGD"] = "post_localSGD"
    wrapper: Wrapper | None = wrapper_option()
    start_localSGD_iter: int = option(
        100, ge=0, description="Iterations of all-reduce over all ranks; averaging starts after them."
    )
    subgroup_size: int | None = option(
        None,
        ge=1,
        description="Number of ranks that continue to average gradients with each other at every step. null: the ranks "
        "of one node.",
    )
    post_local_gradient_allreduce: bool = option(
        True,
        description="What each rank uses after the first start_localSGD_iter iterations. true: gradients averaged over "
        "its subgroup. false: its own gradients.",
    )
    model_averaging_period: int | None = option(
        None,
        ge=1,
        description="Steps from one averaging of the parameters over all ranks to the next (PeriodicModelAverager). "
        "null: 4; this key must be null if period_group_size_dict is set. 1 sends as much as all-reduce does.",
    )
    period_group_size_dict: dict[int, int] | None = option(
        None,
        min_length=1,
        description="Averaging of the parameters in levels (HierarchicalModelAverager). Each key is a period in steps; "
        "its value is the number of ranks of a group. A longer period has a larger group; the largest group has all "
        "ranks. After a step, Ratchet averages with the largest period that divides the step's number "
        "(counted from 0).",
    )

    @property
    def period(self) -> int:
        """Number of steps from one averaging over all ranks to the next."""
        if self.period_group_size_dict is not None:
            return max(self.period_group_size_dict)
        return self.model_averaging_period or 4

    def __post_init__(self) -> None:
        """Check the parameters; keys of ``period_group_size_dict`` in text form, as in JSON, become integers. Raises
        ``ValueError``."""
        groups = self.period_group_size_dict
        if isinstance(groups, dict):  # JSON's keys are strings
            groups = {int(key) if isinstance(key, str) and key.isdecimal() else key: groups[key] for key in groups}
            object.__setattr__(self, "period_group_size_dict", groups)
        super().__post_init__()
        if groups is None:
            return
        if self.model_averaging_period is not None:
            raise ValueError("give model_averaging_period or period_group_size_dict, not both")
        rows = sorted(groups.items())
        if any(period < 1 or size < 2 for period, size in rows):
            raise ValueError("period_group_size_dict: periods are at least 1, groups at least 2 ranks")
        for (_, size), (later, larger) in itertools.pairwise(rows):
            if larger <= size or larger % size:
                raise ValueError(
                    f"period_group_size_dict: groups of {later} steps must be a multiple of {size} ranks, not {larger}"
                )

    def faults(self, world_size: int, node_ranks: int) -> list[tuple[str, str]]:
        """Return ``(parameter, problem)`` for each value that is impossible with ``world_size`` ranks, ``node_ranks`` of them on
        each node."""
        size = node_ranks if self.subgroup_size is None else self.subgroup_size
        out = []
        if world_size % size:
            out.append(("subgroup_size", f"{world_size} ranks cannot be divided into subgroups of {size}"))
        if (
            self.period_group_size_dict is not None
            and (last := max(self.period_group_size_dict.values())) != world_size
        ):
            text = f"its largest group has {last} ranks, but the last averaging is over all {world_size} of them"
            out.append(("period_group_size_dict", text))
        return out
