"""A user's own hook: any function that ``register_comm_hook`` accepts, with its state saved and restored.

The function receives its state object and DDP's bucket. In static graph's first iteration, and under a 16-bit wrapper, it
receives another object with the bucket's methods in its place. A spec without a state: the function receives the process group
in its place, like torch's stateless hooks.

``ExistingObjectsHook`` is a user's hook made of existing objects, in place of import paths. Its function receives the ``state``
that was given with it, also None.
"""

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
    """Context manager: in it every collective of this thread is complete when the call that starts it returns, in whatever way
    it is called.

    A hook starts its second collective, and does its arithmetic, in callbacks of the first. On gloo those run in whichever
    thread completes the first: two buckets cross in different orders on different ranks, and products have other bits from one
    run to the next, because the number of threads and the handling of denormals belong to the thread. After a collective that
    is complete, callbacks run at once, in the thread that called the hook. Sends and receives are not changed: two ranks that
    both send before they receive would wait for one another, and the hook has to wait for them itself, since they have no
    future.
    """
    return after_collectives(_wait)


def _wait(operator: str, result: Any) -> None:
    """Wait for the work in the result of a c10d operator, unless it is a send or a receive."""
    if operator not in _POINT_TO_POINT:
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, torch.ScriptObject):
                part.wait()  # type: ignore[attr-defined]  # of c10d's Work


class Custom(Algorithm):
    """A user's own hook, imported by the paths in its spec. Without NCCL ``run`` completes a bucket before it returns: its
    collectives run in order, and it waits for the hook's future."""

    def __init__(self, spec: CustomSpec, setup: Setup) -> None:
        """Import the hook and the state's class, and create the state. Raises ``CustomHookError`` for a hook or state that
        cannot be used, and ``HookStateError`` for a new state that cannot be saved: this is detected here, not at the first
        checkpoint."""
        super().__init__(setup)
        self.spec = spec
        self._hook = find_hook(spec.hook)
        self._state_class = None if spec.state is None else find_state(spec.state, spec.state_args)
        self._synchronous = not is_nccl(setup.group, setup.device)
        self.state = self._make_state()
        if self._state_class is not None:
            self._encode_state()

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int | None]:
        """Call the user's function on a bucket. Returns the future of its result, and None, since the number of bytes sent is
        unknown.

        Raises ``CustomHookError`` if the function raises or does not return a future. It also does if the future fails, or
        holds no tensor of the bucket's shape, dtype and device; on NCCL the returned future then fails instead. Errors of
        memory or device are raised as they are. Raises ``TorchUnsupported`` on a torch where collectives cannot be made
        synchronous.
        """
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
        """Return the state as its class saves it: tensors by name, and a JSON part. The tensors are always copies, whatever
        ``copy`` is, since it is unknown when the user's code changes them. The JSON part also contains the layout, since a
        state may use bucket indices as keys. For a hook without a state: no tensors, and None. Raises
        ``HookStateError`` for a state that cannot be saved."""
        if self._state_class is None:
            return {}, None
        tensors, data = self._encode_state()
        buckets: JsonValue = None if layout is None else [list[JsonValue](bucket) for bucket in layout]
        copies = {f"{_PREFIX}{name}": tensor.clone() for name, tensor in tensors.items()}
        return copies, {"class": self.spec.state, "layout": buckets, "data": data}

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Restore the result of ``capture`` into the state object. Tensors that were on an accelerator are put on this rank's
        device, others on the CPU. Raises ``HookStateError`` for a state of another class or layout, and for one that the class
        cannot load; in the last case a new state object replaces the old one."""
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
        """Return the report, with the bytes of the tensors in the state object. Elements and compression rate are known only if
        the state has ``compression_stats()``, as PowerSGD's has; otherwise the rate is None. Raises ``CustomHookError`` if
        ``compression_stats()`` fails or returns something else than three numbers."""
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
        """Return the state as tensors and JSON. Raises ``HookStateError`` if the class's method fails, and for a value that
        cannot be stored, with its name."""
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
        """Put a saved value into the state object. If the object's ``process_group`` is None afterwards, it becomes this hook's
        group."""
        assert self._state_class is not None and self.spec.state is not None
        if state_protocol(self._state_class, self.spec.state) == "getstate":
            self.state.__setstate__(saved)
        else:
            self.state.load_state_dict(saved)
        if getattr(self.state, "process_group", self) is None:
            self.state.process_group = self.group


def saved_state(tensors: Mapping[str, torch.Tensor], state: Mapping[str, JsonValue]) -> Any:
    """Return the value that the state's class had saved, decoded from the result of ``Custom.capture``. ``state``: its JSON
    part. Raises ``HookStateError`` if it is malformed."""
    return decode(_unprefixed(tensors), state.get("data"))


def redistribute(
    spec: CustomSpec, states: Sequence[tuple[Mapping[str, torch.Tensor], JsonValue]]
) -> tuple[Tensors, JsonValue]:
    """Return the state (tensors and JSON) that all ranks of a new group get, the same on each. ``states``: the results of
    ``Custom.capture`` on all ranks of the old group, in rank order.

    The user's class merges them: its class method ``redistribute(saved)`` receives a list with the value that each rank's
    object had saved (by ``__getstate__`` or ``state_dict``), and returns one value of that kind. For a hook without a state the
    result is empty. Raises ``HookStateError`` if there is no such method, if it fails, or if a state is not one of this class.
    Raises ``CustomHookError`` if the class cannot be used.
    """
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
    """Return the future's result as a tensor that DDP can read: contiguous, from offset 0 of its memory; a copy if ``value`` is
    not. ``flat``: the bucket; ``context``: for messages. Raises ``CustomHookError`` for a result that is no tensor, or has
    another shape, dtype or device than the bucket."""
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
    """Yield the strided tensors of a state object: those in its attributes, and in lists, tuples and dictionaries in them.
    Attributes of further objects are not searched."""
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
    """Return the values of a spec that names ``function`` and the class of ``state`` by their import paths. A process group,
    or None, counts as no state."""
    values: dict[str, Any] = {"name": "custom", "hook": _import_path(function)}
    if state is not None and not isinstance(state, dist.ProcessGroup):
        values["state"] = _import_path(type(state))
    return values


class ExistingObjectsHook(Custom):
    """A user's own hook that runs the given ``function`` and ``state`` object, instead of importing what the spec names. If a
    restore fails, the object ``state`` may be partly overwritten, and stays in use: no new one can be made."""

    def __init__(self, function: Callable[..., Any], state: Any, spec: CustomSpec, setup: Setup) -> None:
        """Use ``function`` and ``state`` as they are. Raises ``CustomHookError`` for a state whose class cannot save its
        objects, and ``HookStateError`` for a state that cannot be saved."""
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
    """Return ``module:name`` for an object. The name is the last part of its qualified name, or of that of its class if it has
    none; characters that no identifier has, as in ``<lambda>``, become ``_``."""
    name = getattr(target, "__qualname__", type(target).__qualname__).rpartition(".")[2]
    return f"{target.__module__}:{re.sub(r'[^A-Za-z0-9_]', '_', name)}"
