"""Bucket layouts: reading them from DDP's reducer and giving a new reducer a recorded one.

A *layout* is the list of buckets in the order in which they are reduced, each a list of parameter names. It is part of a run's
bits: residuals belong to positions in a bucket, and with three or more ranks the order in which a ring all-reduce adds an element
depends on its position. DDP starts with one layout and rebuilds it once, before the second iteration, in the order in which
gradients became ready; a resumed process would do the same and so run one iteration (or all, when the order has changed since) on
other buckets than the run it continues.

``ManagedDDP`` therefore passes the reducer its parameters in the recorded order and lets it rebuild before the first forward: the
rebuilt layout *is* the recorded one, and the reducer never rebuilds again. With ``find_unused_parameters`` there is no rebuild
and the constructed layout follows from module and options alone. With ``static_graph`` DDP learns the graph in its first
iteration and rebuilds before the third; a process resumed in between could not repeat that, so a managed static graph uses
reversed registration order from its very first iteration, resumed or not.

All of this relies on private API of torch: ``torch_compat`` checks for its methods before a ``ManagedDDP`` is made, and for its
attributes on the DDP. A recorded layout is compared with the reducer's after construction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ratchet_hooks import torch_compat
from ratchet_hooks.ddp.bucket_order import order_for
from ratchet_hooks.errors import LayoutMismatch, UnsupportedModel

Layout = list[list[str]]


class ManagedDDP(DistributedDataParallel):
    """DDP whose reducer uses the bucket layout ``recorded`` from the first iteration on; None: DDP's own layout, or
    under static graph the one of reversed registration order. Construction is a collective."""

    _recorded: Layout | None
    _names: dict[int, str]
    _static_wanted: bool
    _limits: tuple[int, int] | None
    _trains: bool  # a forward with gradients has begun
    hook: Any = None  # the ManagedHook that is registered

    def __init__(self, module: torch.nn.Module, *, recorded: Layout | None, **kwargs: Any) -> None:
        """``kwargs``: those of ``DistributedDataParallel``. Raises ``UnsupportedModel`` for a model or options that cannot be
        managed, ``LayoutMismatch`` if the recorded layout is impossible here, ``TorchUnsupported`` for an unsuitable torch."""
        torch_compat.check_torch_version()
        # Bypasses nn.Module's attribute handling: the base constructor already calls _build_params_for_reducer.
        names = {id(p): name for name, p in module.named_parameters()}
        static = bool(kwargs.get("static_graph"))
        self.__dict__.update(_recorded=recorded, _names=names, _static_wanted=static, _limits=None, _trains=False)
        super().__init__(module, **kwargs)
        _check_reducer(self)
        self._apply_layout(recorded)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for ``copy.deepcopy`` and pickle, without the reducer and the hook, as torch's DDP does. The copy
        averages gradients as DDP does without a hook. Raises ``RuntimeError`` unless DDP is in the default process group."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        for name in ("hook", "_comm_hooks", "_names", "_limits"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of ``__getstate__``. As with torch's DDP the copy is in the default process group. It has no
        hook, and a new reducer without a recorded layout."""
        names = {id(p): name for name, p in state["_modules"]["module"].named_parameters()}
        static = state["static_graph"]
        fresh = {"_recorded": None, "_names": names, "_static_wanted": static, "_limits": None, "_trains": False}
        self.__dict__.update(fresh)
        super().__setstate__({**state, **fresh, "_comm_hooks": []})  # type: ignore[no-untyped-call]
        self.register_forward_pre_hook(_sync_buffers_if_training)

    @classmethod
    def adopt(cls, ddp: DistributedDataParallel) -> ManagedDDP:
        """Turn the existing DDP ``ddp`` into a managed one and return it: the same object, with a new reducer. A hook that was
        registered on it is removed.

        A collective, before the first forward. Raises ``UnsupportedModel`` if this DDP or its model cannot be managed; ``ddp``
        is then unchanged. Raises ``TorchUnsupported`` for an unsuitable torch.
        """
        torch_compat.check_torch_version()
        _check_adoptable(ddp)
        names = {id(p): name for name, p in ddp.module.named_parameters()}
        ddp.__dict__.update(_recorded=None, _names=names, _static_wanted=ddp.static_graph, _limits=None, _trains=False)
        ddp.__class__ = cls
        assert isinstance(ddp, cls)
        try:
            ddp.set_layout(None)
        except UnsupportedModel:
            ddp.__class__ = DistributedDataParallel  # type: ignore[assignment]
            raise
        return ddp

    def set_layout(self, recorded: Layout | None) -> None:
        """Replace the reducer by a new one with the layout ``recorded`` (None: as for the class). ``hook``, if it is not None, is
        registered on it.

        A collective, before the first forward with gradients of this process. Raises ``RuntimeError`` after that forward,
        ``LayoutMismatch`` for a layout that is impossible here, and ``UnsupportedModel`` for sparse gradients. After a
        ``LayoutMismatch`` the reducer may be a new one, with the hook and a layout that is neither ``recorded`` nor the former.
        """
        if self._trains:
            raise RuntimeError(
                "the buckets of a DDP that has trained cannot be rebuilt: restore into a new DDP, before its first forward"
            )
        before, self._recorded = self._recorded, recorded
        try:
            parameters, sparse = self._build_params_for_reducer()
        except (UnsupportedModel, LayoutMismatch):
            self._recorded = before
            raise
        names: Any = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        self._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        # The logger holds a reference: both are dropped, so that the old buckets are freed before the new ones are made.
        del self.__dict__["reducer"]
        self.logger = None
        self._ddp_init_helper(parameters, sparse, names, self._static_wanted)
        self._comm_hooks, self._has_rebuilt_buckets = [], False
        if self._static_wanted:
            self.static_graph = False
            self._set_static_graph()
        if self.hook is not None:
            self.hook.register()
        self._apply_layout(recorded)

    def _apply_layout(self, recorded: Layout | None) -> None:
        """Make the layout of a new reducer final if ``recorded`` is not None, or if the graph is static. Otherwise DDP rebuilds
        its buckets once, later; with ``find_unused_parameters`` it never does. A collective. Raises ``LayoutMismatch`` if the
        reducer has another layout than ``recorded``."""
        self._layout_final = self.find_unused_parameters
        if not self._layout_final and (recorded is not None or self.static_graph):
            self.fix_layout()
        if recorded is not None and (found := self.read_layout()) != recorded:
            raise layout_mismatch(recorded, found, "after construction")

    @property
    def is_layout_final(self) -> bool:
        """True if DDP can no longer change the layout: its one rebuild of the buckets is done, or will not happen."""
        return self._layout_final or self._has_rebuilt_buckets

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters whose gradients DDP averages, by name, in registration order: those that require gradients,
        without those that DDP is configured to ignore."""
        ignored = self.parameters_to_ignore
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad and n not in ignored}

    def name_of(self, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)]

    def fix_layout(self) -> None:
        """Make the layout final now, by the rebuild that the next forward would do. The new order is that of the reducer's
        parameters, or, after a backward pass, that in which gradients became ready.

        A collective: every rank calls it. Does nothing if the layout is final. Raises ``TorchUnsupported`` if torch does not
        rebuild.
        """
        if not self.is_layout_final:
            torch_compat.push_all_parameters(self.reducer)
            self.rebuild_if_due()
            if not self.is_layout_final:
                raise torch_compat.missing("rebuild of DDP's buckets before the first forward")

    def rebuild_if_due(self) -> None:
        """Do the rebuild of the buckets that the next forward would begin with, if one is due. A collective; does nothing if
        the layout is final."""
        if not self.is_layout_final and torch_compat.rebuild_buckets(self.reducer):
            self._has_rebuilt_buckets = True

    def read_layout(self) -> Layout:
        """Return the reducer's current buckets as lists of parameter names. Temporarily allocates zeros of the size of all
        gradients."""
        return [[self.name_of(p) for p in bucket] for bucket in torch_compat.bucket_parameters(self.reducer)]

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """Return the trained parameters in the order from which DDP makes the recorded layout, and a False for each, which
        tells DDP that its gradients are not sparse. Called by DDP.

        Without a recorded layout, and with ``find_unused_parameters``, the order is that of registration; under static graph
        without a recorded layout it is the reverse. Raises ``UnsupportedModel`` for sparse gradients, and ``LayoutMismatch`` if
        the recorded layout has other parameters or cannot be rebuilt.
        """
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = [self.name_of(p) for p in parameters]
        if any(sparse):
            name = names[sparse.index(True)]
            raise UnsupportedModel(f"{name} produces sparse gradients, which no managed hook handles; use sparse=False")
        order = list(range(len(names)))
        if self._recorded is not None and not self.find_unused_parameters:
            check_names([name for bucket in self._recorded for name in bucket], names)
            order = order_for(self._recorded, parameters, names, self._bucket_limits())
        elif self._static_wanted:
            order.reverse()
        return [parameters[i] for i in order], [False] * len(order)

    def _set_static_graph(self) -> None:
        """Do what torch's method does if DDP was constructed with static graph. Raises ``UnsupportedModel`` otherwise: a later
        switch would change the buckets in the middle of the run."""
        if not self._static_wanted:
            raise UnsupportedModel(
                "_set_static_graph was called after DDP was built, so its buckets would change in the middle of the run; set "
                "static_graph: true in DDP's options"
            )
        super()._set_static_graph()  # type: ignore[no-untyped-call]

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Always raises ``UnsupportedModel``: under ``join`` a rank that has run out of batches takes part with gradients that
        no hook's state accounts for."""
        raise UnsupportedModel("DDP's join is not supported; give every rank the same number of batches")

    def _ddp_init_helper(self, *args: Any) -> None:
        """Make a new reducer with the bucket limit that DDP was constructed with. Afterwards ``bucket_bytes_cap`` is increased
        to at least torch's default for the first bucket: from then on only torch.compile reads it, and asserts that it is not
        smaller."""
        self.bucket_bytes_cap = self._bucket_limits()[1]
        super()._ddp_init_helper(*args)  # type: ignore[no-untyped-call]
        self.bucket_bytes_cap = max(self.bucket_bytes_cap, torch_compat.first_bucket_bytes())

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Begin a forward pass as torch's DDP does, except for two cases under static graph, in which torch would fail an
        internal assertion or not average gradients. Raises ``UnsupportedModel`` for a first pass with gradients under
        ``no_sync``. Raises ``RuntimeError`` for a pass with gradients after a first backward that failed half-way."""
        learning = self.static_graph and not self._static_graph_delay_allreduce_enqueued
        if learning and not self.require_backward_grad_sync and torch.is_grad_enabled():
            raise UnsupportedModel(
                "static_graph learns the graph in this process's first backward, which must not be under no_sync; "
                "drop static_graph to accumulate gradients"
            )
        begun = self.static_graph and not learning and torch.is_grad_enabled()
        # With activation checkpointing around all of DDP the forward is run again inside that backward.
        if begun and self.hook is not None and not self.hook.has_run and not torch_compat.in_backward():
            raise RuntimeError(
                "static_graph learns the graph in this process's first backward, and that one failed half-way: torch would "
                "continue without averaging gradients. Let the exception end the process and start again from the last checkpoint"
            )
        self._trains = self._trains or torch.is_grad_enabled()
        return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _bucket_limits(self) -> tuple[int, int]:
        """Return the limits in bytes of the first bucket and of every further one, as they were before ``_ddp_init_helper``
        increased ``bucket_bytes_cap``."""
        if self._limits is None:
            self._limits = torch_compat.bucket_limits(self)
        return self._limits


def _check_reducer(ddp: DistributedDataParallel) -> None:
    """Raise ``UnsupportedModel`` if the DDP's reducer calls no hook, ``TorchUnsupported`` if the DDP lacks a private
    attribute."""
    torch_compat.check_ddp_attributes(ddp)
    if torch_compat.reduces_in_python(ddp):
        raise UnsupportedModel("torch._dynamo's python_reducer runs no communication hook; choose another optimize_ddp")


def _check_adoptable(ddp: DistributedDataParallel) -> None:
    """Raise ``UnsupportedModel`` for a DDP that cannot become a ``ManagedDDP``: a subclass of torch's, one that has run a
    forward, one whose reducer calls no hook, or one with an unsupported option. The model is not checked. Raises
    ``TorchUnsupported`` if the DDP lacks a private attribute."""
    _check_reducer(ddp)
    reason = None
    if type(ddp) is not DistributedDataParallel:
        reason = f"a {type(ddp).__name__} is not torch's DistributedDataParallel itself; wrap the module in that"
    elif torch_compat.has_run_forward(ddp):
        reason = "this DDP has run a forward: register the hook right after its construction"
    elif ddp.mixed_precision is not None:
        reason = "DDP's mixed_precision registers a hook of its own; use torch.autocast instead"
    elif torch_compat.delays_parameters(ddp):
        reason = "delay_all_reduce_named_params reduces gradients without the hook; drop it"
    elif getattr(ddp, "bucket_bytes_cap_list", None):  # not in 2.9
        reason = "bucket_cap_mb_list is not supported; set bucket_cap_mb"
    elif ddp.static_graph and ddp.find_unused_parameters:
        reason = "static_graph finds unused parameters itself; give only one of the two"
    if reason is not None:
        raise UnsupportedModel(reason)


def check_names(recorded: Sequence[str], present: Sequence[str]) -> None:
    """Raise ``LayoutMismatch`` that names the first parameter which is only in ``recorded`` or only in ``present``."""
    for name in recorded:
        if name not in present:
            raise LayoutMismatch(name, "this parameter is in the recorded state, but the model does not train it now")
    for name in present:
        if name not in recorded:
            raise LayoutMismatch(name, "the model trains this parameter, but the recorded state does not have it")


def layout_mismatch(expected: Layout, actual: Layout, when: str) -> LayoutMismatch:
    """Return the error for the caller to raise when two layouts differ; its message names the first bucket that differs. If the
    layouts are equal, the message says that the last bucket has another number of elements. ``when``: a phrase for the message,
    such as ``after construction``."""
    pairs: Any = itertools.zip_longest(expected, actual, fillvalue=[])
    differing = ((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    last = len(actual) - 1, (expected[-1], actual[-1])
    i, (want, have) = next(differing, last)
    names = [a if a is not None else b for a, b in itertools.zip_longest(want, have) if a != b]
    if not names:
        return LayoutMismatch(
            str(have[0] if have else "layout"),
            f"bucket {i} has the recorded parameters {when}, but another number of elements: one of {have[:4]} has another shape",
        )
    return LayoutMismatch(
        str(names[0]),
        f"bucket {i} differs from the recorded layout {when}: expected {want[:4]}, found {have[:4]}; resume with the model, "
        "bucket_cap_mb and DDP options that made the checkpoint",
    )


class CountedBucket:
    """A ``GradBucket`` with the right index, ``is_last`` and parameters.

    In static graph's first iteration torch calls the hook for every bucket with index 0, and with ``is_last`` and parameters
    of bucket 0; buffer and gradients are right.
    """

    def __init__(self, bucket: Any, index: int, parameters: list[torch.Tensor], last: bool) -> None:
        self._bucket = bucket
        self._index = index
        self._parameters = parameters
        self._last = last

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        buffer: torch.Tensor = self._bucket.buffer()
        return buffer

    def gradients(self) -> list[torch.Tensor]:
        gradients: list[torch.Tensor] = self._bucket.gradients()
        return gradients

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._bucket.set_buffer(tensor)


def _sync_buffers_if_training(copied: Any, _: Any) -> None:
    """Forward pre-hook: DDP broadcasts rank 0's buffers (unless ``broadcast_buffers`` is False) before each forward pass with
    gradients, and before no other. Torch decides by the previous pass, which a new process does not know."""
    copied.require_forward_param_sync = torch.is_grad_enabled()
