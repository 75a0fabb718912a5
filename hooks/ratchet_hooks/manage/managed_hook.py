"""The hook of one DDP instance on one rank."""

from __future__ import annotations

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
    """A bucket that was compared with the final layout and fits it. ``ids``: identities of its parameters, which are compared in
    later iterations: that is twenty times as fast as comparing names."""

    ids: list[int]
    names: list[str]
    numel: int


def _real_count(tensor: torch.Tensor) -> int:
    """Return the number of real numbers in ``tensor``. DDP puts a complex number into a bucket as two; in torch 2.9 as one,
    into a complex bucket."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


class ManagedHook:
    """The hook of one DDP instance on one rank. It runs the algorithm on every bucket, captures and restores its state, and
    reports on it.

    ``replicas``: on which ranks parameters are equal between two steps; ``stateful``: True if the hook has a state;
    ``before_change``: if it is not None, it is called before each bucket of a backward pass, since the bucket changes the
    state.
    """

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
        self._bytes: tuple[int, int | None] = (0, 0)
        self._bytes_running: tuple[int, int | None] = (0, 0)

    @property
    def iteration(self) -> int:
        """Number of complete iterations (backward passes that averaged gradients) since the job began, over all processes."""
        return self._earlier_iterations + self._process_iterations

    def layout(self) -> Layout | None:
        """Return the parameter names per bucket, as the next iteration reduces them. None while DDP may still change its buckets:
        before the first iteration, unless they are final from the start (a recorded layout, static graph, unused parameters, a
        user's hook with a state). Raises ``RuntimeError`` inside a backward pass, and after one that ended early.

        The first call after the first iteration may be a collective: DDP's one rebuild of its buckets, which the next forward
        would do, happens in it.
        """
        self._raise_if_in_step("layout")
        if self._final_layout is None and self._process_iterations:
            self._ddp.rebuild_if_due()
            if self._ddp.is_layout_final:
                self._final_layout = self._ddp.read_layout()
        return None if self._final_layout is None else [list(bucket) for bucket in self._final_layout]

    def apply_layout(self, recorded: Layout) -> None:
        """Make DDP reduce in the buckets of ``recorded`` from its first iteration on. DDP gets a new reducer with this hook.

        A collective, before the first forward with gradients. Raises ``LayoutMismatch`` for a layout that is impossible here,
        ``RuntimeError`` after that forward. After a ``LayoutMismatch`` DDP still has this hook, but maybe other buckets.
        """
        try:
            self._ddp.set_layout(recorded)
        finally:
            if self._ddp.is_layout_final:
                self._final_layout = self._ddp.read_layout()
                self._known_buckets.clear()

    def register(self) -> None:
        """Register this hook with DDP's reducer, which gets only a weak reference; ``ddp.hook`` keeps the hook alive. A
        reducer's references are in C++, where no garbage collector sees a cycle: with a strong one, model, buckets and state
        would stay in memory after the last use of DDP."""
        self._ddp.register_comm_hook(weakref.ref(self), self.on_bucket)

    def average_parameters(self) -> None:
        """Average the parameters over the ranks in place, if the hook averages after this step (post_localSGD); otherwise do
        nothing.

        Must be called after every optimizer step, on every rank, before anything reads the parameters: each call counts a step.
        A collective when it averages.
        """
        self._algorithm.average()

    def averaged_parameters(self) -> AbstractContextManager[None]:
        """Return a context manager for an evaluation where replicas differ. In its block the parameters have their mean over
        the ranks. At the end this rank's own values are put back, bit for bit. Entering it is a collective. No effect where
        replicas are equal."""
        if self.replicas == "equal":
            return nullcontext()
        return temporarily_averaged(list(self._parameters.values()), self._algorithm.group)

    def warnings(self) -> list[HookWarning]:
        """Return the numeric problems found so far that raised no error, such as overflow and averages that are not finite:
        one entry per parameter and kind. Synchronises with a CUDA device."""
        return self._algorithm.watch.warnings()

    def capture(self, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """Return this rank's whole state: tensors by name, and a JSON part. Call it between steps, on every rank: the first
        call may be a collective, as ``layout`` is. Raises ``RuntimeError`` inside a backward pass and after one that ended
        early, and ``HookStateError`` for a state that cannot be saved. ``copy`` False: the tensors may be views of live ones,
        valid until the next backward pass, which calls ``before_change`` first."""
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

        The DDP must have the recorded layout (``managed_ddp(recorded_layout=...)``), unless ``relayout`` is True, or the state
        was captured before the layout was final and has none. With ``relayout`` and a recorded layout the call is a collective
        that makes DDP's own layout final. If that layout differs from the recorded one, residuals, P and Q are copied into it by
        parameter name, so later bits differ; of batched_powerSGD the residuals are kept, P and Q are not, and a custom hook's
        state is refused.

        Raises ``HookStateError`` naming the key that does not fit, or ``LayoutMismatch`` for another layout. The hook's state is
        then unchanged, except that a custom hook whose class cannot load the value has a new state object, or, if the hook was
        registered with an existing object, that object, maybe partly overwritten. Raises ``TorchUnsupported`` if the layout
        cannot be made final, and ``RuntimeError`` after an iteration of this process.
        """
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
        """Return the summary's ``residual_norm``, computed from the tensors that ``capture`` returned or from copies of them;
        None for a hook without residuals. May be called in any thread."""
        return self._algorithm.norm_of(tensors)

    def summary(self, *, rank: int, step: int, norm: bool = True) -> HookSummary:
        """Return this rank's summary of the hook. ``step``: steps of the job so far. ``norm`` False: without the residuals'
        norm, which takes a pass over them."""
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
        """Called by DDP for every bucket; returns the future of the bucket's average. ``state``: a weak reference to the hook.
        Raises ``LayoutMismatch`` if the bucket is not one of the final layout; no gradient has then been combined with the
        state of another parameter."""
        return state()._on_bucket(bucket)

    def _on_bucket(self, bucket: Any) -> TensorFuture:
        """Run the algorithm on a bucket and count its bytes; returns the future of its average."""
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
        """Return the bucket with its right index, which is the number of buckets that this backward pass has reduced before it.
        Used in static graph's first iteration."""
        assert self._final_layout is not None
        index = len(self._seen_buckets)
        parameters = [self._parameters[name] for name in self._final_layout[index]]
        return CountedBucket(bucket, index, list(parameters), index == len(self._final_layout) - 1)

    def _names(self, bucket: Any) -> list[str]:
        """Return the names of the bucket's parameters. Raises ``LayoutMismatch`` if the layout is final and has other names or
        another number of elements there. With the first bucket, what is left of a failed backward pass is dropped."""
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
        """Count an iteration as complete, after its last bucket. If DDP's layout is final and was not read yet, it is the buckets
        of this iteration."""
        if self._final_layout is None and self._ddp.is_layout_final:
            self._final_layout = self._seen_buckets
        self._buckets = len(self._seen_buckets)
        self._seen_buckets = []
        self._process_iterations += 1
        self.has_run = True
        self._bytes, self._bytes_running = self._bytes_running, (0, 0)

    def _raise_if_in_step(self, operation: str) -> None:
        """Raise ``RuntimeError`` if some, but not all buckets of a backward pass went through the hook. ``operation``: for the
        message."""
        if self._seen_buckets:
            raise RuntimeError(
                f"{operation} was called inside a backward pass, or after one that ended early: in iteration "
                f"{self.iteration + 1}, "
                f"{len(self._seen_buckets)} buckets went through the hook, but not the last one. Call it between steps; after a "
                "backward that failed, or that left parameters out without find_unused_parameters, DDP cannot continue, and "
                "a state that only some buckets have updated is not saved: start again from the last checkpoint"
            )
