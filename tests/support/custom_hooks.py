"""Hooks and states as users write them, right and wrong, for tests of custom hooks."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_hook"


def import_example() -> None:
    """As the worker does with a job's code directory."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))


def average(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer().div_(group.size())
    work: Any = dist.all_reduce(flat, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Counting:
    """A state by ``state_dict``; it carries a momentum of the average, so that what it forgets is seen."""

    def __init__(self, decay: float = 0.5) -> None:
        self.decay = decay
        self.before: dict[int, torch.Tensor] = {}
        self.lock = threading.Lock()  # never saved

    def state_dict(self) -> dict[str, Any]:
        return {"before": dict(self.before), "names": ["a", "b"], "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before, self.decay = dict(state["before"]), state["decay"]


def smoothed(state: Counting, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    assert dist.group.WORLD is not None
    averaged = average(dist.group.WORLD, bucket).wait()
    index = bucket.index()
    if index in state.before:
        averaged = averaged + state.decay * state.before[index]
    state.before.setdefault(index, torch.empty_like(averaged)).copy_(averaged)  # in place: a capture must be a copy
    return ready(averaged)


def ready(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


class WithGroup:
    """Saves its process group, which nobody can."""

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Regrouped(WithGroup):
    """As some write it: the group is saved as None, and wanted again."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "process_group": None}


def regrouped(state: Regrouped, bucket: Any) -> Any:
    assert state.process_group.size() == dist.get_world_size()
    return average(state.process_group, bucket)


class Nested(WithGroup):
    """Has something three levels down that cannot be stored, from the second bucket on."""

    def __init__(self, at_once: bool = False) -> None:
        self.foo: list[Any] = [{"bar": threading.Lock()}] if at_once else []


def spoil(state: Nested, bucket: Any) -> Any:
    state.foo.append({"bar": threading.Lock()})
    return ready(bucket.buffer())


class Plain:
    """Python gives every object a ``__getstate__``; this class has none of its own."""

    def __init__(self) -> None:
        self.x = 1


class Fixed(WithGroup):
    """Takes back nothing."""

    def __init__(self) -> None:
        self.x = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise KeyError("x")


def own(state: Any, bucket: Any) -> Any:
    return ready(bucket.buffer())


def raises(state: Any, bucket: Any) -> Any:
    return {}["nothing here"]


def raises_later(state: Any, bucket: Any) -> Any:
    return average(state, bucket).then(lambda done: 1 / 0)


def gives_list(state: Any, bucket: Any) -> Any:
    return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()  # type: ignore[union-attr]


def gives_none(state: Any, bucket: Any) -> Any:
    bucket.buffer()


def gives_half(state: Any, bucket: Any) -> Any:
    return ready(bucket.buffer().half())


def gives_short(state: Any, bucket: Any) -> Any:
    return ready(bucket.buffer()[1:])


def gives_number(state: Any, bucket: Any) -> Any:
    return ready(1.0)


def gives_view(state: Any, bucket: Any) -> Any:
    """The right elements, but not at the beginning of their memory, where DDP looks for them."""
    averaged = average(state, bucket).wait()
    return ready(torch.cat([torch.full_like(averaged, 7.0), averaged])[averaged.numel() :])


def swaps(state: Any, bucket: Any) -> Any:
    """Two ranks send to one another before either receives."""
    flat, peer = bucket.buffer().div_(2), 1 - dist.get_rank()
    got = torch.empty_like(flat)
    sent: Any = dist.isend(flat.clone(), peer)
    dist.recv(got, peer)
    sent.wait()
    return ready(flat.add_(got))


def changes_per_rank(state: Any, bucket: Any) -> Any:
    return ready(bucket.buffer() * (1 + dist.get_rank()))


def one_argument(bucket: Any) -> Any: ...


async def sleeps(state: Any, bucket: Any) -> Any: ...
