"""A user's own hook: any function that ``register_comm_hook`` accepts, with its state saved and restored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MemberDescriptorType
from typing import Any

import torch
import torch.distributed as dist

from ratchet_hooks.algorithms.base import Algorithm, Report, Setup, TensorFuture, completed, is_nccl
from ratchet_hooks.algorithms.user_import import (
    constructor_arguments,
    error_summary,
    find_hook,
    find_state,
    state_protocol,
)
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.ddp.bucket_layout import Layout
from ratchet_hooks.errors import CustomHookError, HookStateError
from ratchet_hooks.specs.hook_specs import CustomSpec
from ratchet_hooks.state.encode import Tensors, decode, encode
from ratchet_hooks.torch_compat import after_collectives, storage_id

_FUTURE: Any = torch.futures.Future.__mro__[1]  # the C++ base class, which some of torch's own functions return
_PREFIX = "custom/"  # of the state's tensors, so that the user's names cannot be taken for others
_POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})  # names of c10d operators
_CURE = "have the class save tensors, numbers, strings, lists and dicts instead, or leave it out and create it again"
_GROUP_CURE = "leave it out of what the class saves: process_group is set again after a resume where it is None"


def _synchronous_collectives() -> AbstractContextManager[Any]:
    """Return a context in which every collective of this thread is complete when the call that starts it returns."""
    # Else the hook's callbacks run, on gloo, in whichever thread completes a collective: two buckets cross in different orders on
    # different ranks, and products have other bits (number of threads, denormals).
    return after_collectives(_wait)


def _wait(operator: str, result: Any) -> None:
    """Wait for the work in the result of a c10d operator, unless it is a send or a receive."""
    # Two ranks that both send before they receive would wait for each other.
    if operator not in _POINT_TO_POINT:
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, torch.ScriptObject):
                part.wait()  # type: ignore[attr-defined]  # of c10d's Work


class Custom(Algorithm):
    """A user's own hook, imported by the paths in its spec and called with the state object, or the process group."""

    def __init__(self, spec: CustomSpec, setup: Setup) -> None:
        """Import the hook and create the state. Raises ``CustomHookError``, or ``HookStateError`` if the state cannot be
        saved."""
        super().__init__(setup)
        self.spec = spec
        self._hook = find_hook(spec.hook)
        self._state_class = None if spec.state is None else find_state(spec.state, spec.state_args)
        self._synchronous = not is_nccl(setup.group, setup.device)
        self.state = self._make_state()
        if self._state_class is not None:
            self._encode_state()

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int | None]:
        """Call the user's function on a bucket. Returns the future of its result, and None. Raises ``CustomHookError`` if the
        function, its future or the result is wrong; on NCCL the returned future may fail instead. Errors of memory or device are
        raised unchanged."""
        index, flat = bucket.index(), bucket.buffer()
        place = f"hook {self.spec.hook} in bucket {index} ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"
        collectives = _synchronous_collectives() if self._synchronous else nullcontext()  # may raise TorchUnsupported
        try:
            with collectives:
                future: Any = self._hook(self.group if self._state_class is None else self.state, bucket)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # a fault of the device or machine; a retry may succeed
        except Exception as error:
            raise CustomHookError("hook", "hook-failed", f"{place} raised {error_summary(error)}") from error
        if not isinstance(future, _FUTURE):
            wrong = (
                f"{place} returned a {type(future).__name__}, not a torch.futures.Future of the averaged flat tensor"
            )
            raise CustomHookError("hook", "hook-result", wrong)
        if not self._synchronous:
            checked: Any = future.then(lambda done: _checked_result(done.value(), flat, place))
            return checked, None
        try:
            value = future.wait()
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            raise CustomHookError("hook", "hook-failed", f"{place} failed in its future: {error}") from error
        return completed(_checked_result(value, flat, place)), None

    def capture(self, layout: Layout | None, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """Return the state as its class saves it: copies of tensors, and a JSON part. Raises ``HookStateError`` if that fails."""
        if self._state_class is None:
            return {}, None
        tensors, data = self._encode_state()
        # A state may use bucket indices as keys.
        buckets: JsonValue = None if layout is None else [list[JsonValue](bucket) for bucket in layout]
        # Copies in any case: it is unknown when the user's code changes the tensors.
        copies = {f"{_PREFIX}{name}": tensor.clone() for name, tensor in tensors.items()}
        return copies, {"class": self.spec.state, "layout": buckets, "data": data}

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Restore the result of ``capture`` into the state object. Raises ``HookStateError`` for a state that does not fit; if
        the class cannot load it, a new object replaces the old one."""
        if self._state_class is None:
            super().restore(tensors, state, layout)
            return
        if not isinstance(state, dict) or set(state) != {"class", "layout", "data"}:
            raise HookStateError("state", "not a recorded state of a custom hook")
        if state["class"] != self.spec.state:
            raise HookStateError("state.class", f"recorded for {state['class']}, but the spec names {self.spec.state}")
        if state["layout"] != layout:
            text = (
                "a custom state belongs to the buckets on which it was recorded, and DDP has other buckets now: resume with the "
                "recorded model and DDP settings, or reset the hook (on_hook_mismatch: reset)"
            )
            raise HookStateError("state.layout", text)
        saved = decode(_unprefixed(tensors), state["data"], device=self.setup.device)
        try:
            self._load_state(saved)
        except Exception as error:
            self.state = self._make_state()
            text = f"{self.spec.state} cannot load the state that it saved: {error_summary(error)}"
            raise HookStateError("state", text) from error

    def report(self, *, norm: bool = True) -> Report:
        """Return the report. ``compression_rate`` is None if the state has no ``compression_stats()``. Raises ``CustomHookError``
        if that method fails."""
        stats = getattr(self.state, "compression_stats", None)
        held = sum({storage_id(t): t.untyped_storage().nbytes() for t in _tensors(self.state)}.values())
        if not callable(stats):
            return Report(compression_rate=None, memory_bytes=held)
        try:
            rate, before, after = stats()
            return Report(
                compression_rate=float(rate), elements_before=int(before), elements_after=int(after), memory_bytes=held
            )
        except Exception as error:
            text = (
                f"{self.spec.state}.compression_stats() must give (rate, elements before, elements after): "
                f"{error_summary(error)}"
            )
            raise CustomHookError("state", "hook-failed", text) from error

    def _make_state(self) -> Any:
        """Return a new state object; None for a hook without state. Raises ``CustomHookError`` if its constructor fails."""
        if self._state_class is None:
            return None
        arguments = constructor_arguments(self._state_class, self.spec.state_args, self.group)
        try:
            return self._state_class(**arguments)
        except Exception as error:
            text = f"{self.spec.state}({', '.join(f'{k}=...' for k in arguments)}) raised {error_summary(error)}"
            raise CustomHookError("state_args", "hook-state-arguments", text) from error

    def _encode_state(self) -> tuple[Tensors, JsonValue]:
        """Return the state as tensors and JSON. Raises ``HookStateError`` if the class's method fails or a value cannot be
        stored."""
        assert self._state_class is not None and self.spec.state is not None
        way = state_protocol(self._state_class, self.spec.state)
        try:
            value = self.state.__getstate__() if way == "getstate" else self.state.state_dict()
        except Exception as error:
            raise HookStateError("state", f"{self.spec.state} could not be saved: {error_summary(error)}") from error
        try:
            return encode(value, root="state")
        except HookStateError as error:
            cure = _GROUP_CURE if "ProcessGroup" in error.detail else _CURE
            what = error.detail.partition("; offer")[0]
            raise HookStateError(error.key, f"{what} ({self.spec.state}); {cure}") from error

    def _load_state(self, saved: Any) -> None:
        """Put a saved value into the state object, and this hook's group into its ``process_group`` if that is None."""
        assert self._state_class is not None and self.spec.state is not None
        if state_protocol(self._state_class, self.spec.state) == "getstate":
            self.state.__setstate__(saved)
        else:
            self.state.load_state_dict(saved)
        if getattr(self.state, "process_group", self) is None:
            self.state.process_group = self.group


def saved_state(tensors: Mapping[str, torch.Tensor], state: Mapping[str, JsonValue]) -> Any:
    """Return the value that the state's class had saved, from the result of ``Custom.capture``. Raises ``HookStateError`` if
    malformed."""
    return decode(_unprefixed(tensors), state.get("data"))


def redistribute(
    spec: CustomSpec, states: Sequence[tuple[Mapping[str, torch.Tensor], JsonValue]]
) -> tuple[Tensors, JsonValue]:
    """Return the state (tensors and JSON) for every rank of a new group, merged by the class method ``redistribute`` of the user.
    ``states``: results of ``Custom.capture`` on all old ranks. Raises ``HookStateError`` or ``CustomHookError``."""
    if spec.state is None:
        return {}, None
    merge = getattr(find_state(spec.state, spec.state_args), "redistribute", None)
    if not callable(merge):
        text = (
            f"{spec.state} has no class method redistribute(states) that builds one state for the new number of ranks from the "
            "old ranks' states; add it, or reset the hook (on_hook_mismatch: reset)"
        )
        raise HookStateError("state", text)
    parts = []
    for tensors, data in states:
        if not isinstance(data, dict) or data.get("class") != spec.state:
            raise HookStateError("state.class", f"not a recorded state of {spec.state}")
        parts.append(saved_state(tensors, data))
    try:
        merged, encoded = encode(merge(parts), root="state")
    except HookStateError:
        raise
    except Exception as error:
        raise HookStateError("state", f"{spec.state}.redistribute raised {error_summary(error)}") from error
    first = states[0][1]
    assert isinstance(first, dict)
    return {f"{_PREFIX}{name}": tensor.clone() for name, tensor in merged.items()}, {**first, "data": encoded}


def _checked_result(value: object, flat: torch.Tensor, context: str) -> torch.Tensor:
    """Return the future's result as a contiguous tensor. Raises ``CustomHookError`` if the result does not fit the bucket
    ``flat``."""
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], torch.Tensor):
        text = f"{context}: its future holds a list of one tensor; add .then(lambda done: done.value()[0])"
        raise CustomHookError("hook", "hook-result", text)
    if not isinstance(value, torch.Tensor):
        raise CustomHookError(
            "hook", "hook-result", f"{context}: its future holds a {type(value).__name__}, not a tensor"
        )
    if (value.shape, value.dtype, value.device) != (flat.shape, flat.dtype, flat.device):
        have, want = (f"{list(t.shape)} {t.dtype} on {t.device}" for t in (value, flat))
        raise CustomHookError(
            "hook", "hook-result", f"{context}: its future holds {have}; DDP needs {want}, like the bucket"
        )
    whole = value.is_contiguous() and value.storage_offset() == 0 and not (value.is_conj() or value.is_neg())
    return value if whole else value.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _unprefixed(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors under their names without ``_PREFIX``."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _tensors(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the strided tensors in the attributes of a state object, also in lists, tuples and dictionaries there."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth)
    elif depth == 0:
        members = [m for kind in type(value).__mro__ for m in vars(kind).items()]
        slots = [name for name, kind in members if isinstance(kind, MemberDescriptorType)]  # as in torch's states
        yield from _tensors([*vars(value).values()] if hasattr(value, "__dict__") else [], depth + 1)
        yield from _tensors([getattr(value, slot, None) for slot in slots], depth + 1)


def describe_hook(state: object, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the values of a spec that names ``function`` and the class of ``state``. A process group is not a state."""
    values: dict[str, Any] = {"name": "custom", "hook": _import_path(function)}
    if state is not None and not isinstance(state, dist.ProcessGroup):
        values["state"] = _import_path(type(state))
    return values


class ExistingObjectsHook(Custom):
    """A user's own hook that runs the given ``function`` and ``state`` object. A failed restore may leave ``state`` partly
    overwritten."""

    def __init__(self, function: Callable[..., Any], state: Any, spec: CustomSpec, setup: Setup) -> None:
        """Use ``function`` and ``state`` as they are. Raises ``CustomHookError`` or ``HookStateError`` if the state cannot be
        saved."""
        Algorithm.__init__(self, setup)
        self.spec, self.state = spec, state
        self._state_class = None if spec.state is None else type(state)
        self._hook = function if self._state_class is not None else lambda _, bucket: function(state, bucket)
        self._synchronous = not is_nccl(setup.group, setup.device)
        if self._state_class is not None:
            self._encode_state()

    def _make_state(self) -> Any:
        return self.state


def _import_path(target: Any) -> str:
    """Return ``module:name`` for an object or its class. Each character of the name that is no ASCII letter, digit or
    ``_``, as in ``<lambda>``, becomes ``_``."""
    name = getattr(target, "__qualname__", type(target).__qualname__).rpartition(".")[2]
    return f"{target.__module__}:{re.sub(r'[^A-Za-z0-9_]', '_', name)}"
