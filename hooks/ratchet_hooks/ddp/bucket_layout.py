"""Bucket layouts: reading them from DDP's reducer and giving a new reducer a recorded one. A *layout* is the list of buckets in
reduction order, each a list of parameter names. It is part of a run's bits, since residuals belong to positions in a bucket. DDP
may rebuild its buckets once, in the first iterations."""

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
    """DDP whose reducer uses the bucket layout ``recorded`` from the first iteration on. ``recorded`` None: DDP chooses the
    layout; with static graph, it fills the buckets in reversed registration order. Construction is a collective."""

    _recorded: Layout | None
    _names: dict[int, str]
    _static_wanted: bool
    _limits: tuple[int, int] | None
    _trains: bool  # a forward with gradients has begun
    hook: Any = None  # the ManagedHook that is registered

    def __init__(self, module: torch.nn.Module, *, recorded: Layout | None, **kwargs: Any) -> None:
        """``kwargs``: those of ``DistributedDataParallel``. Raises ``UnsupportedModel``, ``TorchUnsupported``, or
        ``LayoutMismatch`` if the recorded layout is impossible here."""
        torch_compat.check_torch_version()
        # Bypasses nn.Module's attribute handling: the base constructor already calls _build_params_for_reducer.
        names = {id(p): name for name, p in module.named_parameters()}
        static = bool(kwargs.get("static_graph"))
        self.__dict__.update(_recorded=recorded, _names=names, _static_wanted=static, _limits=None, _trains=False)
        super().__init__(module, **kwargs)
        _check_reducer(self)
        self._apply_layout(recorded)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for ``copy.deepcopy`` and pickle, without reducer and hook. Raises ``RuntimeError`` outside the
        default process group."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        for name in ("hook", "_comm_hooks", "_names", "_limits"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of ``__getstate__`` in the default process group, without a hook or a recorded layout."""
        names = {id(p): name for name, p in state["_modules"]["module"].named_parameters()}
        static = state["static_graph"]
        fresh = {"_recorded": None, "_names": names, "_static_wanted": static, "_limits": None, "_trains": False}
        self.__dict__.update(fresh)
        super().__setstate__({**state, **fresh, "_comm_hooks": []})  # type: ignore[no-untyped-call]
        self.register_forward_pre_hook(_sync_buffers_if_training)

    @classmethod
    def adopt(cls, ddp: DistributedDataParallel) -> ManagedDDP:
        """Turn the existing DDP ``ddp`` into a managed one, with a new reducer and no hook, and return the same object. A
        collective, before the first forward. Raises ``UnsupportedModel`` (``ddp`` then works as before) or
        ``TorchUnsupported``."""
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
        """Replace the reducer by one with the layout ``recorded``; None means the same as for the class. Then register ``hook``,
        if it is set, on the new reducer. A collective, before the first forward with gradients; after it, raises
        ``RuntimeError``. Raises ``UnsupportedModel`` too, and ``LayoutMismatch`` for an impossible layout. After these two errors
        the buckets may be neither the recorded nor the former ones."""
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
        """Make the layout of a new reducer final, if ``recorded`` or static graph requires it. A collective. Raises
        ``LayoutMismatch`` if the reducer has another layout than ``recorded``."""
        self._layout_final = self.find_unused_parameters
        if not self._layout_final and (recorded is not None or self.static_graph):
            self.fix_layout()
        if recorded is not None and (found := self.read_layout()) != recorded:
            raise layout_mismatch(recorded, found, "after construction")

    @property
    def is_layout_final(self) -> bool:
        """True if DDP can no longer change the layout: its rebuild is done, or will not happen."""
        return self._layout_final or self._has_rebuilt_buckets

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters whose gradients DDP averages, by name, in registration order."""
        ignored = self.parameters_to_ignore
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad and n not in ignored}

    def name_of(self, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)]

    def fix_layout(self) -> None:
        """Make the layout final now, by the rebuild that the next forward would do. A collective. Raises ``TorchUnsupported``."""
        if not self.is_layout_final:
            torch_compat.push_all_parameters(self.reducer)
            self.rebuild_if_due()
            if not self.is_layout_final:
                raise torch_compat.missing("rebuild of DDP's buckets before the first forward")

    def rebuild_if_due(self) -> None:
        """Do the rebuild of the buckets that the next forward would begin with, if one is due. A collective."""
        if not self.is_layout_final and torch_compat.rebuild_buckets(self.reducer):
            self._has_rebuilt_buckets = True

    def read_layout(self) -> Layout:
        """Return the reducer's buckets as lists of parameter names. Temporarily allocates memory for all gradients."""
        return [[self.name_of(p) for p in bucket] for bucket in torch_compat.bucket_parameters(self.reducer)]

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        """Return the trained parameters in the order from which DDP makes the layout, and a False (not sparse) for each. Called
        by DDP. Raises ``UnsupportedModel`` or ``LayoutMismatch``."""
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
        """Do what torch's method does if DDP was constructed with static graph. Raises ``UnsupportedModel`` otherwise."""
        if not self._static_wanted:
            raise UnsupportedModel(
                "_set_static_graph was called after DDP was built, so its buckets would change in the middle of the run; set "
                "static_graph: true in DDP's options"
            )
        super()._set_static_graph()  # type: ignore[no-untyped-call]

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Always raises ``UnsupportedModel``: no hook's state accounts for the gradients of a rank that has run out of
        batches."""
        raise UnsupportedModel("DDP's join is not supported; give every rank the same number of batches")

    def _ddp_init_helper(self, *args: Any) -> None:
        """Make a new reducer with the bucket limit that DDP was constructed with."""
        self.bucket_bytes_cap = self._bucket_limits()[1]
        super()._ddp_init_helper(*args)  # type: ignore[no-untyped-call]
        # From here on only torch.compile reads it, and asserts that it is not smaller.
        self.bucket_bytes_cap = max(self.bucket_bytes_cap, torch_compat.first_bucket_bytes())

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Begin a forward pass as DDP does. With static graph, raises ``UnsupportedModel`` for a forward with gradients under
        ``no_sync`` before the first backward, and ``RuntimeError`` if that backward has failed."""
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
        """Return the limits in bytes of the first bucket and of every further one."""
        if self._limits is None:
            # Read before ``_ddp_init_helper`` increases ``bucket_bytes_cap``.
            self._limits = torch_compat.bucket_limits(self)
        return self._limits


def _check_reducer(ddp: DistributedDataParallel) -> None:
    """Raise ``UnsupportedModel`` if the reducer calls no hook, ``TorchUnsupported`` if the DDP lacks a private attribute."""
    torch_compat.check_ddp_attributes(ddp)
    if torch_compat.reduces_in_python(ddp):
        raise UnsupportedModel("torch._dynamo's python_reducer runs no communication hook; choose another optimize_ddp")


def _check_adoptable(ddp: DistributedDataParallel) -> None:
    """Raise ``UnsupportedModel`` for a DDP that cannot become a ``ManagedDDP``, for example after a forward, or
    ``TorchUnsupported``."""
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
    """Return the error for two layouts, which names the first bucket that differs. If the layouts are equal, the error is about
    the last bucket's number of elements. ``when``: a phrase such as ``after construction``."""
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
    """A ``GradBucket`` with the right index, ``is_last`` and parameters, which torch's may lack in static graph's first
    iteration."""

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
    """Forward pre-hook: let DDP broadcast rank 0's buffers before a forward pass with gradients, and before no other."""
    # Torch decides by the previous pass, which a new process does not know.
    copied.require_forward_param_sync = torch.is_grad_enabled()
