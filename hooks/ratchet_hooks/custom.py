"""A hook of the user's own: any function that ``register_comm_hook`` takes, with its state saved and brought back.

The function gets DDP's bucket as it is (in static graph's first iteration one that has the right index), and its state object,
or the process group where it has none, as torch's stateless hooks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MemberDescriptorType
from typing import Any

import torch

from ratchet_hooks.algorithm import Algorithm, Report, Setup, TensorFuture, completed, on_nccl
from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.codec import Tensors, decode, encode
from ratchet_hooks.errors import CustomHookError, HookStateError
from ratchet_hooks.layout import Layout
from ratchet_hooks.specs import CustomSpec
from ratchet_hooks.torch_compat import after_collectives, storage_id
from ratchet_hooks.user_hook import call_arguments, find_hook, find_state, last_line, way_of

_FUTURE: Any = torch.futures.Future.__mro__[1]  # written in C++, which some of torch's own functions return
_PREFIX = "custom/"  # of the state's tensors, so that no name of the user's means something to others
_POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})  # of c10d's operators
_CURE = "make it tensors, numbers, strings, lists and dicts in what the class saves, or leave it out and make it again"
_GROUP_CURE = "leave it out of what the class saves: process_group is set again after a resume where it is None"


def _in_order() -> AbstractContextManager[Any]:
    """Inside, every collective is complete when the call that starts it returns, whichever way it is called.

    A hook starts its second collective, and does its arithmetic, in callbacks of the first. On gloo those run in whichever thread
    ends the first: two buckets cross in different orders on different ranks, and products come out in other bits from one run
    to the next, because the number of threads and the handling of denormals belong to the thread. Behind a collective that is
    complete, callbacks run at once, in the thread that called the hook. Sends and receives are left alone: two ranks that both
    send before they receive would wait for one another, and the hook has to wait for them itself, since they have no future.
    """
    return after_collectives(_wait)


def _wait(operator: str, result: Any) -> None:
    if operator not in _POINT_TO_POINT:
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, torch.ScriptObject):
                part.wait()  # type: ignore[attr-defined]  # of c10d's Work


class Custom(Algorithm):
    """Off NCCL a bucket is finished within ``run``: its collectives in order, its future waited for."""

    def __init__(self, spec: CustomSpec, setup: Setup) -> None:
        """Raises ``CustomHookError`` for a hook or state that cannot be used, ``HookStateError`` for a state that cannot be saved
        as it is made: known now, not at the first checkpoint."""
        super().__init__(setup)
        self.spec = spec
        self._hook = find_hook(spec.hook)
        self._kind = None if spec.state is None else find_state(spec.state, spec.state_args)
        self._waits = not on_nccl(setup.group, setup.device)
        self.state = self._make()
        if self._kind is not None:
            self._encoded()

    def run(self, bucket: Any, names: Sequence[str]) -> tuple[TensorFuture, int | None]:
        index, flat = bucket.index(), bucket.buffer()
        place = f"hook {self.spec.hook} in bucket {index} ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"
        try:
            with _in_order() if self._waits else nullcontext():
                future: Any = self._hook(self.group if self._kind is None else self.state, bucket)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # the device's or the machine's fault, which another attempt may heal
        except Exception as error:
            raise CustomHookError("hook", "hook-failed", f"{place} raised {last_line(error)}") from error
        if not isinstance(future, _FUTURE):
            wrong = (
                f"{place} returned a {type(future).__name__}, not a torch.futures.Future of the averaged flat tensor"
            )
            raise CustomHookError("hook", "hook-result", wrong)
        if not self._waits:
            checked: Any = future.then(lambda done: _checked(done.value(), flat, place))
            return checked, None
        try:
            value = future.wait()
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            raise CustomHookError("hook", "hook-failed", f"{place} failed in its future: {error}") from error
        return completed(_checked(value, flat, place)), None

    def capture(self, layout: Layout | None, *, copy: bool = True) -> tuple[Tensors, JsonValue]:
        """What the state's class saves. A state may be keyed by bucket index, so the layout belongs to it. Copies in any case:
        when code of the user's own changes it is not ours to know."""
        if self._kind is None:
            return {}, None
        tensors, data = self._encoded()
        buckets: JsonValue = None if layout is None else [list[JsonValue](bucket) for bucket in layout]
        copies = {f"{_PREFIX}{name}": tensor.clone() for name, tensor in tensors.items()}
        return copies, {"class": self.spec.state, "layout": buckets, "data": data}

    def restore(self, tensors: Mapping[str, torch.Tensor], state: JsonValue, layout: Layout | None) -> None:
        """Into the state object as its arguments made it; tensors that lay on an accelerator lie on this rank's again."""
        if self._kind is None:
            super().restore(tensors, state, layout)
            return
        if not isinstance(state, dict) or set(state) != {"class", "layout", "data"}:
            raise HookStateError("state", "not a recorded state of a custom hook")
        if state["class"] != self.spec.state:
            raise HookStateError(
                "state.class", f"recorded of {state['class']}, but the spec asks for {self.spec.state}"
            )
        if state["layout"] != layout:
            text = (
                "a state of one's own belongs to the buckets that it was recorded on, and DDP stands on others: resume with the "
                "recorded model and DDP settings, or start the hook anew (on_hook_mismatch: reset)"
            )
            raise HookStateError("state.layout", text)
        saved = decode(_plain(tensors), state["data"], device=self.setup.device)
        try:
            self._give_back(saved)
        except Exception as error:
            self.state = self._make()
            text = f"{self.spec.state} does not take what it saved: {last_line(error)}"
            raise HookStateError("state", text) from error

    def report(self, *, norm: bool = True) -> Report:
        """What is sent is the function's own affair: known only if the state has ``compression_stats()`` as PowerSGD's has."""
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
            text = f"{self.spec.state}.compression_stats() is to give (rate, elements before, elements after): {last_line(error)}"
            raise CustomHookError("state", "hook-failed", text) from error

    def _make(self) -> Any:
        if self._kind is None:
            return None
        arguments = call_arguments(self._kind, self.spec.state_args, self.group)
        try:
            return self._kind(**arguments)
        except Exception as error:
            text = f"{self.spec.state}({', '.join(f'{k}=...' for k in arguments)}) raised {last_line(error)}"
            raise CustomHookError("state_args", "hook-state-arguments", text) from error

    def _encoded(self) -> tuple[Tensors, JsonValue]:
        """The state as tensors and JSON. Raises ``HookStateError`` naming the key of what cannot be stored."""
        assert self._kind is not None and self.spec.state is not None
        way = way_of(self._kind, self.spec.state)
        try:
            value = self.state.__getstate__() if way == "getstate" else self.state.state_dict()
        except Exception as error:
            raise HookStateError("state", f"{self.spec.state} could not be saved: {last_line(error)}") from error
        try:
            return encode(value, where="state")
        except HookStateError as error:
            cure = _GROUP_CURE if "ProcessGroup" in error.detail else _CURE
            what = error.detail.partition("; offer")[0]
            raise HookStateError(error.key, f"{what} ({self.spec.state}); {cure}") from error

    def _give_back(self, saved: Any) -> None:
        assert self._kind is not None and self.spec.state is not None
        if way_of(self._kind, self.spec.state) == "getstate":
            self.state.__setstate__(saved)
        else:
            self.state.load_state_dict(saved)
        if getattr(self.state, "process_group", self) is None:
            self.state.process_group = self.group


def saved_state(tensors: Mapping[str, torch.Tensor], state: Mapping[str, JsonValue]) -> Any:
    """What the state's class had saved, of what ``Custom.capture`` gave. Raises ``HookStateError``."""
    return decode(_plain(tensors), state.get("data"))


def redistribute(
    spec: CustomSpec, states: Sequence[tuple[Mapping[str, torch.Tensor], JsonValue]]
) -> tuple[Tensors, JsonValue]:
    """One state for every rank of a new group, out of ``Custom.capture`` of all ranks of the old one, in rank order.

    The class does it: ``redistribute(saved)``, a class method, gets the list of what its objects had saved (``__getstate__`` or
    ``state_dict``), and returns one of that kind. Raises ``HookStateError`` where it has no such method, or the method fails.
    """
    if spec.state is None:
        return {}, None
    merge = getattr(find_state(spec.state, spec.state_args), "redistribute", None)
    if not callable(merge):
        text = (
            f"{spec.state} has no class method redistribute(states) that makes one state for the new number of ranks out of the "
            "old ranks' states; add it, or start the hook anew (on_hook_mismatch: reset)"
        )
        raise HookStateError("state", text)
    parts = []
    for tensors, data in states:
        if not isinstance(data, dict) or data.get("class") != spec.state:
            raise HookStateError("state.class", f"not a recorded state of {spec.state}")
        parts.append(saved_state(tensors, data))
    try:
        merged, encoded = encode(merge(parts), where="state")
    except HookStateError:
        raise
    except Exception as error:
        raise HookStateError("state", f"{spec.state}.redistribute raised {last_line(error)}") from error
    first = states[0][1]
    assert isinstance(first, dict)
    return {f"{_PREFIX}{name}": tensor.clone() for name, tensor in merged.items()}, {**first, "data": encoded}


def _checked(value: object, flat: torch.Tensor, place: str) -> torch.Tensor:
    """The result as DDP reads it: element i at offset i of the memory, whatever offset or strides a view has."""
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], torch.Tensor):
        text = f"{place}: its future holds a list of one tensor; add .then(lambda done: done.value()[0])"
        raise CustomHookError("hook", "hook-result", text)
    if not isinstance(value, torch.Tensor):
        raise CustomHookError(
            "hook", "hook-result", f"{place}: its future holds a {type(value).__name__}, not a tensor"
        )
    if (value.shape, value.dtype, value.device) != (flat.shape, flat.dtype, flat.device):
        have, want = (f"{list(t.shape)} {t.dtype} on {t.device}" for t in (value, flat))
        raise CustomHookError(
            "hook", "hook-result", f"{place}: its future holds {have}; DDP needs {want}, as the bucket came"
        )
    whole = value.is_contiguous() and value.storage_offset() == 0 and not (value.is_conj() or value.is_neg())
    return value if whole else value.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _plain(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _tensors(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    """Those that a state object holds, in its attributes and the containers in them."""
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
