"""Post-local SGD (Lin et al., arXiv 1808.07217): torch's ``post_localSGD_hook`` and its averagers as one hook with one state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from ratchet_hooks.algorithms.base import Algorithm, Report, Setup, TensorFuture, completed
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.ddp.bucket_layout import Layout
from ratchet_hooks.ddp.parameter_averaging import Averager, average_in_place
from ratchet_hooks.ddp.process_groups import partition
from ratchet_hooks.errors import HookStateError, UnsupportedModel
from ratchet_hooks.specs.local_sgd import PostLocalSGDSpec
from ratchet_hooks.state.encode import Tensors
from ratchet_hooks.torch_versions import TESTED

_SLOTS = ("start_localSGD_iter", "post_local_gradient_allreduce", "iter")
_GROUPS = ("process_group", "subgroup")


class PostLocalSGD(Algorithm):
    """Averages all gradients until iteration ``start_localSGD_iter``, then within subgroups or not at all, and parameters
    periodically. Raises ``UnsupportedModel`` for impossible settings. Construction may be a collective."""

    def __init__(self, spec: PostLocalSGDSpec, setup: Setup) -> None:
        super().__init__(setup)
        self._spec = spec
        if faults := spec.faults(self.group.size(), setup.node_ranks):
            raise UnsupportedModel("; ".join(f"{key}: {text}" for key, text in faults))
        parts = _Parts(setup)
        size = spec.subgroup_size or setup.node_ranks
        subgroup = parts.for_size(size) if spec.post_local_gradient_allreduce else None
        self.state = PostLocalSGDState(
            self.group, subgroup, spec.start_localSGD_iter, spec.post_local_gradient_allreduce
        )  # type: ignore[no-untyped-call]
        levels = spec.period_group_size_dict
        periods = {spec.period: self.group.size()} if levels is None else levels
        groups = {period: parts.for_size(ranks) for period, ranks in periods.items()}
        self.averager = Averager(groups, hierarchical=levels is not None)
        if spec.start_localSGD_iter == 0:
            self.averager.warm_up = 0

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int]:
        """Begin to average a bucket: over all ranks in the warm-up, then over the subgroup or not at all. Returns the average's
        future and the bytes sent."""
        buffer, state = bucket.buffer(), self.state
        if self.local:
            group = state.subgroup if state.post_local_gradient_allreduce else None
        else:
            group = state.process_group
            state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
            if self.local:
                # Not torch's warmup_steps: with two losses, or steps without a backward, replicas would drift apart unaveraged,
                # or be averaged while they are still equal.
                self.averager.warm_up = self.averager.step + 1
        if group is None:
            return completed(buffer), 0
        work: Any = dist.all_reduce(buffer.div_(group.size()), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0]), buffer.nbytes

    @property
    def local(self) -> bool:
        """True if the warm-up is over: the next iteration averages gradients over the subgroup only, or not at all."""
        return bool(self.state.iter >= self.state.start_localSGD_iter)

    def average(self) -> None:
        """Count a step, and average the parameters in place if that is due. A collective only when it averages."""
        group = self.averager.next_group()
        if group is not None:
            average_in_place(list(self.setup.parameters.values()), group)

    def capture(self, layout: Layout | None, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """Return the state of ``PostLocalSGDState`` and of the averager as JSON, equal on all ranks; there are no tensors."""
        averager = self._requested_settings() | self._averager_state()
        return {}, {"slots": get_state(self.state), "averager": averager, "subgroup": self._subgroup()}

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Restore the result of ``capture``. Raises ``HookStateError``, and changes nothing, if the state does not fit."""
        recorded = state if isinstance(state, dict) else {}
        slots, averager = recorded.get("slots"), recorded.get("averager")
        if tensors or not isinstance(slots, dict) or not isinstance(averager, dict):
            raise HookStateError(min(tensors, default="state"), "not a recorded state of post_localSGD")
        _check_equal(slots, get_state(self.state) | {"iter": slots.get("iter")}, "state")
        _check_equal(
            averager,
            self._requested_settings() | {key: averager.get(key) for key in self._averager_state()},
            "averager",
        )
        self._check_subgroup(recorded.get("subgroup"))
        _check_count(slots["iter"], "state.iter")
        step, warm_up = _check_count(averager["step"], "averager.step"), averager["warm_up"]
        self.averager.warm_up = None if warm_up is None else _check_count(warm_up, "averager.warm_up")
        self.averager.step = step
        set_state(self.state, slots)

    def report(self, *, norm: bool = True) -> Report:
        """Return the phase, the averager's step, and the number of steps to the next averaging."""
        left = self.state.start_localSGD_iter - self.state.iter
        warm_up = self.averager.warm_up if self.averager.warm_up is not None else self.averager.step + left
        return Report(
            phase="local" if self.local else "warm-up",
            averager_step=self.averager.step,
            steps_to_averaging=self.averager.steps_until(warm_up),
        )

    def _averager_state(self) -> dict[str, JsonValue]:
        """Return the averager's counters."""
        return {"step": self.averager.step, "warm_up": self.averager.warm_up}

    def _requested_settings(self) -> dict[str, JsonValue]:
        """Return the settings outside ``PostLocalSGDState`` that must be equal for an exact continuation."""
        levels = self._spec.period_group_size_dict
        return {
            # None if the spec does not set it: its default depends on the number of ranks.
            "subgroup_size": self._spec.subgroup_size,
            "period": self._spec.period,
            "levels": None if levels is None else [[period, size] for period, size in sorted(levels.items())],
        }

    def _subgroup(self) -> dict[str, JsonValue]:
        """Return the number of all ranks, and of those over which gradients are averaged after the warm-up."""
        group = self.state.subgroup
        return {"ranks": self.group.size(), "size": 1 if group is None else group.size()}

    def _check_subgroup(self, recorded: Any) -> None:
        """Raise ``HookStateError`` if the number of all ranks is the recorded one, but the subgroups have another size."""
        here = self._subgroup()
        if isinstance(recorded, dict) and recorded.get("ranks") == here["ranks"] and recorded != here:
            text = (
                f"recorded with subgroups of {recorded.get('size')} ranks (one node each), but a node has {here['size']} "
                "now: run as many ranks per node as before (LOCAL_WORLD_SIZE, node_ranks), or reset the hook"
            )
            raise HookStateError("state.subgroup", text)


class _Parts:
    """Makes groups of consecutive ranks of the main group. All ranks must request the sizes in the same order."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._groups: dict[int, dist.ProcessGroup] = {}

    def for_size(self, size: int) -> dist.ProcessGroup | None:
        """Return this rank's group of ``size`` ranks; None for 1, which needs no communication. May be a collective."""
        if size == 1:
            return None
        if size not in self._groups:
            self._groups[size] = partition(self._setup.group, self._setup.device, size)
        return self._groups[size]


def get_state(state: PostLocalSGDState) -> dict[str, JsonValue]:
    """Return everything in ``state`` except its process groups. Raises ``HookStateError`` if torch's class has other
    attributes."""
    if odd := set(state.__slots__) ^ {*_SLOTS, *_GROUPS}:
        raise HookStateError(
            f"state.{min(odd)}",
            f"PostLocalSGDState of torch {torch.__version__} has other attributes: install one of torch {', '.join(TESTED)}",
        )
    return {key: getattr(state, key) for key in _SLOTS}


def set_state(state: PostLocalSGDState, slots: Mapping[str, Any]) -> None:
    """Set the attributes that ``get_state`` returned; the process groups stay attached."""
    for key in _SLOTS:
        setattr(state, key, slots[key])


def _check_equal(recorded: Mapping[str, Any], expected: Mapping[str, Any], prefix: str) -> None:
    """Raise ``HookStateError`` for the first key that is missing, unknown or not equal. ``prefix``: for the message."""
    if odd := set(recorded) ^ set(expected):
        raise HookStateError(f"{prefix}.{min(odd)}", "missing or unknown in the recorded state")
    for key, value in expected.items():
        if recorded[key] != value:
            raise HookStateError(
                f"{prefix}.{key}", f"recorded with {recorded[key]!r}, but the requested hook has {value!r}"
            )


def _check_count(value: Any, key: str) -> int:
    """Return ``value``. Raises ``HookStateError`` unless it is an integer of at least 0."""
    if type(value) is not int or value < 0:
        raise HookStateError(key, f"recorded as {value!r}, but it must be a count")
    return value
