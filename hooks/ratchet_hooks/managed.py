"""The hook of one DDP instance on one rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ratchet_hooks.algorithm import Algorithm, TensorFuture
from ratchet_hooks.averagers import averaged
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.checks import no_apex
from ratchet_hooks.codec import Tensors
from ratchet_hooks.errors import LayoutMismatch
from ratchet_hooks.layout import CountedBucket, Layout, ManagedDDP, check_names, mismatch
from ratchet_hooks.registry import Replicas, is_stateful, replicas_of
from ratchet_hooks.specs import HookSpec
from ratchet_hooks.states import STATE_VERSION, check_data
from ratchet_hooks.summary import HookSummary
from ratchet_hooks.watch import HookWarning


class _Known(NamedTuple):
    """A bucket of the final layout that was checked: comparing identities again is twenty times as fast as names."""

    ids: list[int]
    names: list[str]
    numel: int


def _reals(tensor: torch.Tensor) -> int:
    """Real numbers in it: DDP lays a complex number as two into a bucket, in torch 2.9 as one in a bucket of complex ones."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


class ManagedHook:
    """The hook of one DDP instance on one rank: runs it, captures and restores its state, tells what it does.

    ``replicas`` says whether parameters are equal on all ranks between two steps, ``stateful`` whether a state is captured.
    """

    def __init__(self, spec: HookSpec, ddp: ManagedDDP, algorithm: Algorithm) -> None:
        self.spec = spec
        self.replicas: Replicas = replicas_of(spec)
        self.stateful: bool = is_stateful(spec)
        self._ddp = ddp
        self._algorithm = algorithm
        self._parameters = ddp.trained()
        self._elements = sum(map(_reals, self._parameters.values()))
        self._options: dict[str, JsonValue] = spec.parameters()
        self._fixed: Layout | None = ddp.read_layout() if ddp.fixed else None
        self._seen: Layout = []
        self._buckets = 0  # of the last complete iteration
        self._known: dict[int, _Known] = {}  # by index; filled only once the layout is final
        self.before_change: Callable[[], None] | None = None  # called when a backward pass is about to change the state
        self._here = 0  # complete iterations of this process
        self.has_run = False  # one of them; no property: a compiled model would be compiled anew for each number
        self._before = 0  # complete iterations of the processes before it
        self._bytes: tuple[int, int | None] = (0, 0)
        self._bytes_running: tuple[int, int | None] = (0, 0)

    @property
    def iteration(self) -> int:
        """Complete iterations (backward passes that synchronised) since the job began."""
        return self._before + self._here

    def layout(self) -> Layout | None:
        """Parameter names per bucket as the next iteration will reduce them; None before the first one of a fresh run.

        A collective the first time it is called after an iteration: DDP's one rebuild, due at the next forward, happens here.
        """
        self._between_steps("layout")
        if self._fixed is None and self._here:
            self._ddp.settle()
            if self._ddp.fixed:
                self._fixed = self._ddp.read_layout()
        return None if self._fixed is None else [list(bucket) for bucket in self._fixed]

    def lay_out(self, recorded: Layout) -> None:
        """Have DDP reduce in the buckets of ``recorded`` from its first iteration on: a new reducer, under this hook.

        A collective, before the first forward. Raises ``LayoutMismatch`` for a layout that cannot stand here, ``RuntimeError``
        after that forward.
        """
        self._ddp.stand_on(recorded)
        self.register()
        self._fixed = self._ddp.read_layout()
        self._known.clear()

    def register(self) -> None:
        """Have DDP's reducer call this hook. It holds no more than a weak reference: what a reducer holds is behind C++, where no
        garbage collector sees a cycle, and model, buckets and state would outlive the last use of DDP; ``ddp.hook`` keeps this
        hook alive."""
        self._ddp.register_comm_hook(weakref.ref(self), self.on_bucket)

    def average_parameters(self) -> None:
        """Call after every optimizer step, on every rank, before anything reads the parameters.

        A collective in the steps in which the hook averages the ranks' parameters (post_localSGD); else without effect.
        """
        self._algorithm.average()

    def averaged_parameters(self) -> AbstractContextManager[None]:
        """Inside, the parameters hold their mean over the ranks, and afterwards this rank's own again, bit for bit: what to
        evaluate where replicas differ. A collective then, and without effect where they are equal."""
        if self.replicas == "equal":
            return nullcontext()
        return averaged(list(self._parameters.values()), self._algorithm.group)

    def warnings(self) -> list[HookWarning]:
        """What went wrong without an error: overflow, non-finite averages; one entry per parameter and kind."""
        return self._algorithm.watch.warnings()

    def capture(self, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """This rank's whole state, by parameter name, and its JSON part. Call between steps, on every rank. ``copy`` False allows
        views of live tensors: they hold until the next backward pass calls this hook, just before which it calls
        ``before_change``."""
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
        """Continue from a captured state, bit for bit. Call before the first forward, after model and optimizer are loaded.

        The DDP must stand on the recorded layout (``managed_ddp(recorded_layout=...)``). With ``relayout`` it may stand on
        another: residuals, P and Q are laid by parameter name into it, which loses nothing but is no longer bit for bit.
        Raises ``HookStateError`` naming the key that does not fit; the hook is then unchanged.
        """
        checked = check_data(data, self.spec)
        if self._here:
            raise RuntimeError("restore comes before the first forward of a newly built DDP")
        recorded = checked["layout"]
        if recorded is not None:
            check_names([name for bucket in recorded for name in bucket], list(self._parameters))
            if relayout:
                self._ddp.fix_layout()
                self._fixed = self._ddp.read_layout()
            if self._fixed is None:
                raise LayoutMismatch("layout", "pass the recorded layout to managed_ddp(recorded_layout=...)")
            if self._fixed != recorded and not relayout:
                raise mismatch(recorded, self._fixed, "of the restored state")
        self._algorithm.restore(tensors, checked["state"], self._fixed if recorded is not None else None)
        self._before = checked["iteration"]

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> float | None:
        """``residual_norm`` of the summary, from what ``capture`` gave (or copies of it). In any thread."""
        return self._algorithm.norm_of(tensors)

    def summary(self, *, rank: int, step: int, norm: bool = True) -> HookSummary:
        """JSON view of this rank's hook after ``step`` steps; ``norm`` False leaves out the norm, a pass over the residuals."""
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
            buckets=len(self._fixed) if self._fixed is not None else self._buckets,
            averager_step=report.averager_step,
            next_averaging=None if report.steps_to_averaging is None else step + report.steps_to_averaging,
        )

    @staticmethod
    def on_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types, not names
        """What DDP calls for every bucket; ``state`` is a weak reference to the hook. Raises ``LayoutMismatch`` before a gradient
        could meet another's state."""
        return state()._on_bucket(bucket)

    def _on_bucket(self, bucket: Any) -> TensorFuture:
        if self.before_change is not None:
            self.before_change()
        if self._ddp.static_graph and self._here == 0:
            bucket = self._counted(bucket)
        names = self._names(bucket)
        if self._here == 0:
            no_apex(self.spec)  # it may have come behind the construction of DDP
        self._seen.append(names)
        self._algorithm.watch.iteration = self.iteration + 1
        last, before = bucket.is_last(), bucket.buffer().nbytes
        future, sent = self._algorithm.run(bucket, names)
        running = self._bytes_running
        known = None if running[1] is None or sent is None else running[1] + sent
        self._bytes_running = (running[0] + before, known)
        if last:
            self._complete()
        return future

    def _counted(self, bucket: Any) -> CountedBucket:
        assert self._fixed is not None
        index = len(self._seen)
        parameters = [self._parameters[name] for name in self._fixed[index]]
        return CountedBucket(bucket, index, list(parameters), index == len(self._fixed) - 1)

    def _names(self, bucket: Any) -> list[str]:
        """Of the bucket's parameters. Raises ``LayoutMismatch`` when they are not those of the layout that stands."""
        index = bucket.index()
        if index == 0 and self._seen:
            self._seen, self._bytes_running = [], (0, 0)  # a backward before this one failed half-way
        parameters, numel = bucket.parameters(), _reals(bucket.buffer())
        known = self._known.get(index)
        if known is not None and known.numel == numel and known.ids == [*map(id, parameters)]:
            return known.names
        names = [self._ddp.name_of(p) for p in parameters]
        if self._fixed is not None:
            self._check(index, names, numel)
            self._known[index] = _Known([*map(id, parameters)], names, numel)
        return names

    def _check(self, index: int, names: list[str], numel: int) -> None:
        assert self._fixed is not None
        expected = self._fixed[index] if index < len(self._fixed) else []
        if names != expected or numel != sum(_reals(self._parameters[name]) for name in expected):
            raise mismatch([*self._seen, expected], [*self._seen, names], f"in iteration {self.iteration + 1}")

    def _complete(self) -> None:
        if self._fixed is None and self._ddp.fixed:
            self._fixed = self._seen
        self._buckets = len(self._seen)
        self._seen = []
        self._here += 1
        self.has_run = True
        self._bytes, self._bytes_running = self._bytes_running, (0, 0)

    def _between_steps(self, what: str) -> None:
        if self._seen:
            raise RuntimeError(
                f"{what} was called inside a backward pass, or behind one that ended early: of iteration {self.iteration + 1} "
                f"{len(self._seen)} buckets went through the hook, and not the last one. Call it between steps; behind a "
                "backward that failed, or that left parameters out without find_unused_parameters, DDP cannot go on, and a state "
                "that some buckets have moved in is not saved: start again from the last checkpoint"
            )
