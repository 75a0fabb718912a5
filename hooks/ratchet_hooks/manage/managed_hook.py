"""The hook of one DDP instance on one rank."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ratchet_hooks.algorithms.base import Algorithm, TensorFuture
from ratchet_hooks.algorithms.preconditions import check_no_apex
from ratchet_hooks.algorithms.state_version import STATE_VERSION, check_data
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.ddp.bucket_layout import CountedBucket, Layout, ManagedDDP, check_names, layout_mismatch
from ratchet_hooks.ddp.numeric_warnings import HookWarning
from ratchet_hooks.ddp.parameter_averaging import temporarily_averaged
from ratchet_hooks.errors import LayoutMismatch
from ratchet_hooks.specs.hook_specs import HookSpec
from ratchet_hooks.specs.registry import Replicas, is_stateful, replicas_of
from ratchet_hooks.state.encode import Tensors
from ratchet_hooks.summary import HookSummary


class _Known(NamedTuple):
    """A bucket that fits the final layout. ``ids``: identities of its parameters, which are faster to compare than names."""

    ids: list[int]
    names: list[str]
    numel: int


def _real_count(tensor: torch.Tensor) -> int:
    """Return the number of real numbers in ``tensor``; a complex element counts as two."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


class ManagedHook:
    """The hook of one DDP instance on one rank. Attributes: ``replicas``: the result of ``replicas_of``; ``before_change``:
    called before each bucket, unless it is None."""

    def __init__(self, spec: HookSpec, ddp: ManagedDDP, algorithm: Algorithm) -> None:
        self.spec = spec
        self.replicas: Replicas = replicas_of(spec)
        self.stateful: bool = is_stateful(spec)
        self._ddp = ddp
        self._algorithm = algorithm
        self._parameters = ddp.trained_parameters()
        self._elements = sum(map(_real_count, self._parameters.values()))
        self._options: dict[str, JsonValue] = spec.parameters()
        self._final_layout: Layout | None = ddp.read_layout() if ddp.is_layout_final else None
        self._seen_buckets: Layout = []
        self._buckets = 0  # of the last complete iteration
        self._known_buckets: dict[int, _Known] = {}  # by index; filled only once the layout is final
        self.before_change: Callable[[], None] | None = None  # called before each bucket, which changes the state
        self._process_iterations = 0  # complete iterations of this process
        self.has_run = (
            False  # True once one is complete; not a property: a compiled model would be recompiled for each number
        )
        self._earlier_iterations = 0  # complete iterations of earlier processes
        self.first_bucket_at = 0.0  # monotonic time of the last call for the first bucket of a backward pass
        self._bytes: tuple[int, int | None] = (0, 0)
        self._bytes_running: tuple[int, int | None] = (0, 0)

    @property
    def iteration(self) -> int:
        """Number of complete iterations (backward passes of which all buckets went through the hook), with those of the restored
        state."""
        return self._earlier_iterations + self._process_iterations

    def layout(self) -> Layout | None:
        """Return the parameter names per bucket; None while DDP may still change its buckets. May be a collective. Raises
        ``RuntimeError`` if only some buckets of a backward pass went through the hook."""
        self._raise_if_in_step("layout")
        if self._final_layout is None and self._process_iterations:
            self._ddp.rebuild_if_due()
            if self._ddp.is_layout_final:
                self._final_layout = self._ddp.read_layout()
        return None if self._final_layout is None else [list(bucket) for bucket in self._final_layout]

    def apply_layout(self, recorded: Layout) -> None:
        """Make DDP reduce in the buckets of ``recorded``. A collective, before the first forward with gradients. Raises
        ``LayoutMismatch`` for an impossible layout."""
        try:
            self._ddp.set_layout(recorded)
        finally:
            if self._ddp.is_layout_final:
                self._final_layout = self._ddp.read_layout()
                self._known_buckets.clear()

    def register(self) -> None:
        """Register this hook with DDP's reducer, which gets only a weak reference; ``ddp.hook`` keeps the hook alive."""
        # a strong reference from C++ would form a cycle that no garbage collector sees, and keep model and state in memory
        self._ddp.register_comm_hook(weakref.ref(self), self.on_bucket)

    def average_parameters(self) -> None:
        """Average the parameters over the ranks in place, if this step requires that. Must be called after every optimizer step,
        on every rank."""
        self._algorithm.average()

    def averaged_parameters(self) -> AbstractContextManager[None]:
        """Return a context manager in whose block the parameters have their mean over the ranks. Entering it may be a
        collective."""
        if self.replicas == "equal":
            return nullcontext()
        return temporarily_averaged(list(self._parameters.values()), self._algorithm.group)

    def warnings(self) -> list[HookWarning]:
        """Return the numeric problems found so far that raised no error, such as overflow. Synchronises with a CUDA device."""
        return self._algorithm.watch.warnings()

    def capture(self, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """Return this rank's whole hook state: tensors by name, and a JSON part. Call it between steps, on every rank; it may be
        a collective. ``copy`` False: the tensors may be views of live ones, valid until the next backward pass. Raises
        ``HookStateError`` for a state that cannot be saved, and ``RuntimeError`` as ``layout`` does."""
        layout = self.layout()
        data: dict[str, JsonValue] = {
            "version": STATE_VERSION,
            "hook": self.spec.name,
            "wrapper": self.spec.wrapper,
            "iteration": self.iteration,
            "layout": None if layout is None else [list[JsonValue](bucket) for bucket in layout],
        }
        tensors, data["state"] = self._algorithm.capture(layout, copy=copy)
        return tensors, data

    def restore(self, tensors: Mapping[str, torch.Tensor], data: JsonValue, *, relayout: bool = False) -> None:
        """Continue from a captured state, bit for bit. Call it before the first forward, after model and optimizer are loaded.
        Raises ``HookStateError`` for a state that does not fit, ``LayoutMismatch`` for another bucket layout. ``relayout`` True:
        another layout is accepted, but the bits of later steps may differ; the call is then a collective."""
        checked = check_data(data, self.spec)
        if self._process_iterations:
            raise RuntimeError("call restore before the first forward of a newly built DDP")
        recorded = checked["layout"]
        if recorded is not None:
            check_names([name for bucket in recorded for name in bucket], list(self._parameters))
            if relayout:
                self._ddp.fix_layout()
                self._final_layout = self._ddp.read_layout()
            if self._final_layout is None:
                raise LayoutMismatch("layout", "pass the recorded layout to managed_ddp(recorded_layout=...)")
            if self._final_layout != recorded and not relayout:
                raise layout_mismatch(recorded, self._final_layout, "of the restored state")
        self._algorithm.restore(tensors, checked["state"], self._final_layout if recorded is not None else None)
        self._earlier_iterations = checked["iteration"]

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> float | None:
        """Return the norm of the residuals among captured tensors; None for a hook without residuals. Callable in any thread."""
        return self._algorithm.norm_of(tensors)

    def summary(self, *, rank: int, step: int, norm: bool = True) -> HookSummary:
        """Return this rank's summary of the hook. ``step``: steps of the job so far. ``norm``: include the residuals' norm."""
        report = self._algorithm.report(norm=norm)
        elements = self._elements
        known = report.compression_rate is not None
        return HookSummary(
            name=self.spec.name,
            wrapper=self.spec.wrapper,
            parameters=self._options,
            rank=rank,
            step=step,
            phase=report.phase,
            iteration=self.iteration if report.iteration is None else report.iteration,
            compression_rate=report.compression_rate,
            elements_before=elements if report.elements_before is None else report.elements_before,
            elements_after=elements if known and report.elements_after is None else report.elements_after,
            bytes_before=self._bytes[0],
            bytes_after=self._bytes[1],
            residual_norm=report.residual_norm,
            memory_bytes=report.memory_bytes,
            buckets=len(self._final_layout) if self._final_layout is not None else self._buckets,
            averager_step=report.averager_step,
            next_averaging=None if report.steps_to_averaging is None else step + report.steps_to_averaging,
        )

    @staticmethod
    def on_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types, not names
        """Called by DDP for every bucket; returns the future of its result. ``state``: a weak reference to the hook. Raises
        ``LayoutMismatch``."""
        return state()._on_bucket(bucket)

    def _on_bucket(self, bucket: Any) -> TensorFuture:
        """Run the algorithm on a bucket and count its bytes; returns the future of its result."""
        if not self._seen_buckets:
            self.first_bucket_at = time.monotonic()
        if self.before_change is not None:
            self.before_change()
        if self._ddp.static_graph and self._process_iterations == 0:
            bucket = self._counted_bucket(bucket)
        names = self._names(bucket)
        if self._process_iterations == 0:
            check_no_apex(self.spec)  # it may have been imported after the construction of DDP
        self._seen_buckets.append(names)
        self._algorithm.watch.iteration = self.iteration + 1
        last, before = bucket.is_last(), bucket.buffer().nbytes
        future, sent = self._algorithm.run(bucket, names)
        running = self._bytes_running
        known = None if running[1] is None or sent is None else running[1] + sent
        self._bytes_running = (running[0] + before, known)
        if last:
            self._complete()
        return future

    def _counted_bucket(self, bucket: Any) -> CountedBucket:
        """Return the bucket with its right index and parameters, for static graph's first iteration."""
        assert self._final_layout is not None
        index = len(self._seen_buckets)
        parameters = [self._parameters[name] for name in self._final_layout[index]]
        return CountedBucket(bucket, index, list(parameters), index == len(self._final_layout) - 1)

    def _names(self, bucket: Any) -> list[str]:
        """Return the names of the bucket's parameters. Raises ``LayoutMismatch`` if the layout is final and this bucket
        differs."""
        index = bucket.index()
        if index == 0 and self._seen_buckets:
            self._seen_buckets, self._bytes_running = [], (0, 0)  # an earlier backward failed half-way
        parameters, numel = bucket.parameters(), _real_count(bucket.buffer())
        known = self._known_buckets.get(index)
        if known is not None and known.numel == numel and known.ids == [*map(id, parameters)]:
            return known.names
        names = [self._ddp.name_of(p) for p in parameters]
        if self._final_layout is not None:
            self._check_bucket(index, names, numel)
            self._known_buckets[index] = _Known([*map(id, parameters)], names, numel)
        return names

    def _check_bucket(self, index: int, names: list[str], numel: int) -> None:
        """Raise ``LayoutMismatch`` unless the bucket has the names and the number of elements that the final layout has at
        ``index``."""
        assert self._final_layout is not None
        expected = self._final_layout[index] if index < len(self._final_layout) else []
        if names != expected or numel != sum(_real_count(self._parameters[name]) for name in expected):
            raise layout_mismatch(
                [*self._seen_buckets, expected], [*self._seen_buckets, names], f"in iteration {self.iteration + 1}"
            )

    def _complete(self) -> None:
        """Count an iteration as complete, after its last bucket."""
        if self._final_layout is None and self._ddp.is_layout_final:
            self._final_layout = self._seen_buckets
        self._buckets = len(self._seen_buckets)
        self._seen_buckets = []
        self._process_iterations += 1
        self.has_run = True
        self._bytes, self._bytes_running = self._bytes_running, (0, 0)

    def _raise_if_in_step(self, operation: str) -> None:
        """Raise ``RuntimeError`` if some, but not all buckets of a backward pass went through the hook."""
        if self._seen_buckets:
            raise RuntimeError(
                f"{operation} was called inside a backward pass, or after one that ended early: in iteration "
                f"{self.iteration + 1}, "
                f"{len(self._seen_buckets)} buckets went through the hook, but not the last one. Call it between steps; after a "
                "backward that failed, or that left parameters out without find_unused_parameters, DDP cannot continue, and "
                "a state that only some buckets have updated is not saved: start again from the last checkpoint"
            )
