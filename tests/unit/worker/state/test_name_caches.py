"""A save keeps names and places from the one before: whatever a training changes, it must give what a first save gives."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ratchet_contract.errors import StateError, UserError
from ratchet_store.format.shard_slices import plan_slices
from ratchet_worker.checkpoint.copy_sources import Lister, Source
from ratchet_worker.checkpoint.host_copy import Staging
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.state.live_memory import LiveTensors
from ratchet_worker.state.replica_digests import Cuts, slice_digests
from ratchet_worker.state.snapshot import Snapshot, Until, byte_view, flat

pytestmark = pytest.mark.usefixtures("no_small_tensors")

CPU = torch.device("cpu")


class Net(nn.Module):
    """``fixed``: without attributes that may change within themselves."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(6, 4, bias=False))
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.register_buffer("later", None)
        self.count, self.rate, self.shape = 1, 0.5, (2, (3, None))
        self.act = torch.relu
        if not fixed:
            self.names, self.held = ["a"], torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)))
        return out


class Job:
    """A rank that has saved twice, so that all is kept that can be."""

    def __init__(self, kind: str = "equal") -> None:
        """``kind``: what the replicas are; ``fixed``: equal, of a ``Net`` that is."""
        torch.manual_seed(0)
        replicas, self.net = "rank" if kind == "rank" else "equal", Net(kind == "fixed")
        parameters = [*self.net.parameters()]
        groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1}]
        self.adam = torch.optim.AdamW(groups, lr=0.01)
        self.sgd = torch.optim.SGD([self.net.first.weight], lr=0.1, momentum=0.9)
        ddp = SimpleNamespace(module=self.net, require_forward_param_sync=True)
        self._wrapped = (ddp, SimpleNamespace(replicas=replicas, capture=self._hook))
        self.kept = self._rank()
        self.step()
        self.kept.capture(), self.kept.capture()
        self.lister, self.staging, self.cuts = Lister(1), Staging(CPU), Cuts()
        self.copied(self.kept.capture(), self.lister, self.staging, self.cuts)

    def _rank(self) -> JobState:
        state = JobState(1, CPU)
        state.set_model(*self._wrapped)  # type: ignore[arg-type]
        state.register("optimizer", self.adam), state.register("other", self.sgd)
        return state

    def first(self) -> JobState:
        """Of a rank that has never saved."""
        state = self._rank()
        state._origin = self.kept._origin
        return state

    @staticmethod
    def _hook(*, copy: bool) -> tuple[dict[str, torch.Tensor], Any]:
        assert not copy
        return {"error": torch.ones(2)}, {"iteration": 1}

    def step(self) -> None:
        self.net(torch.randn(5, 4)).sum().backward()
        for optimizer in (self.adam, self.sgd):
            optimizer.step()
        for optimizer in (self.adam, self.sgd):
            optimizer.zero_grad()

    @staticmethod
    def copied(snapshot: Snapshot, lister: Lister, staging: Staging, cuts: Cuts) -> list[tuple[Any, ...]]:
        """What is written of a snapshot."""
        staged = staging.stage(lister.list_sources(snapshot, cuts.plan(snapshot.sizes(), 2)[1]))
        staged.finish()
        pieces, data = staged.data_to_write()
        return [*pieces, bytes(data)]


def facts(snapshot: Snapshot) -> list[Any]:
    """All that a save takes from a snapshot, orders too."""
    tensors = [
        [(name, t.dtype, tuple(t.shape), bytes(byte_view(flat(t)))) for name, t in group.items()]
        for group in (snapshot.shared, snapshot.private)
    ]
    until = {name: snapshot.until.get(name, Until.BOUNDARY) for name in (*snapshot.shared, *snapshot.private)}
    return [*tensors, snapshot.state, until, [*snapshot.sizes()]]


def _data(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Job], None]:
    def change(job: Job) -> None:
        job.net.first.weight.data = make(job.net.first.weight.data)

    return change


def _state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Job], None]:
    return lambda job: change(job.adam.state[job.net.first.weight])


def _tie(job: Job) -> None:
    job.net.last[1].tied = job.net.first.bias


def _rename(job: Job) -> None:
    del job.net.norm._buffers["running_var"]
    job.net.norm.register_buffer("running_other", torch.ones(6))


def _swap_places(job: Job) -> None:
    """The same names and the same tensors in each part, in another order."""
    weight = job.net.first._parameters.pop("weight")
    job.net.first._parameters["weight"] = weight


def _reorder_state(job: Job) -> None:
    first = next(iter(job.adam.state))
    job.adam.state[first] = job.adam.state.pop(first)


def _reorder_states_of_one_form(job: Job) -> None:
    items = [*job.adam.state.items()]
    items[1], items[2] = items[2], items[1]
    job.adam.state.clear()
    job.adam.state.update(items)


def _another_number_in_a_state(job: Job) -> None:
    state = job.adam.state[job.net.first.weight]
    state["more"] = 7
    job.kept.capture(), job.kept.capture()
    state["more"] = 8


def _exchange_values(state: dict[str, Any]) -> None:
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def _swap_attributes(job: Job) -> None:
    """As many as before, and none of them under the name that it had."""
    del job.net.count
    job.net.counted = None


def _another_class(job: Job) -> None:
    class Counting(nn.BatchNorm1d):
        def get_extra_state(self) -> Any:
            return {"n": 1}

    job.net.norm.__class__ = Counting


def _other_attributes(job: Job) -> None:
    """What ``__setstate__`` and some loaders do."""
    held = vars(job.net.norm)
    job.net.norm.__dict__ = {**held, "_buffers": {n: torch.ones(6) for n in held["_buffers"]}, "momentum": 0.5}


def _a_state_dict_of_its_own(job: Job) -> None:
    job.adam.state_dict = lambda: {**torch.optim.AdamW.state_dict(job.adam), "n": 1}  # type: ignore[method-assign]


def _other_shape_same_strides(job: Job) -> None:
    _data(lambda t: torch.ones(4, 6).t())(job)
    job.kept.capture()
    _data(lambda t: torch.ones(2, 6).t())(job)


def _buffers_of_its_own(job: Job) -> None:
    job.net.named_buffers = lambda *a, **k: iter([("mine", torch.ones(2))])  # type: ignore[method-assign]


def _swapped_for_a_while(job: Job) -> None:
    others = {name: torch.zeros_like(p) for name, p in job.net.named_parameters()}
    torch.func.functional_call(job.net, others, torch.randn(5, 4))


def _a_list_in_a_group(job: Job) -> None:
    job.adam.param_groups[0]["betas"] = [0.9, 0.99]
    job.kept.capture(), job.kept.capture()
    job.adam.param_groups[0]["betas"][1] = 0.5


def _frozen_where_nothing_is_trained(job: Job) -> None:
    with torch.no_grad():
        job.kept.capture()
        job.net.first.bias.requires_grad_(False)
        job.kept.capture()


def _a_hook_for_a_while(job: Job) -> None:
    handle = job.net.norm.register_state_dict_post_hook(lambda *a: a[1].clear())
    job.kept.capture()
    handle.remove()


def _an_object_that_changes(job: Job) -> None:
    job.net.norm.config = SimpleNamespace(count=1)
    job.kept.capture(), job.kept.capture()
    job.net.norm.config.count = 2


def _a_mode_that_is_told_elsewhere(job: Job) -> None:
    class Switched(nn.BatchNorm1d):
        switch = SimpleNamespace(on=True)

        @property
        def training(self) -> bool:
            return self.switch.on

        @training.setter
        def training(self, on: bool) -> None:
            self.switch.on = on

    job.net.norm.__class__ = Switched
    job.kept.capture(), job.kept.capture()
    Switched.switch.on = False


def _parts_that_a_part_lists_itself(job: Job) -> None:
    class Hiding(nn.Sequential):
        hidden = True

        def named_modules(self, *args: Any, **named: Any) -> Any:
            found = super().named_modules(*args, **named)
            return (one for one in found if not (self.hidden and isinstance(one[1], nn.ReLU)))

    job.net.last.__class__ = Hiding
    job.kept.capture(), job.kept.capture()
    Hiding.hidden = False
    job.net.last[0].eval()


def _a_dictionary_in_a_group(job: Job) -> None:
    """What a scheduler keeps there, and changes within itself."""
    job.adam.param_groups[0]["plan"] = ({"peak": 1.0}, [1, 2])
    job.kept.capture(), job.kept.capture()
    job.adam.param_groups[0]["plan"][0]["peak"] = 2.0


def _a_rate_that_is_filled_anew(job: Job) -> None:
    rate = torch.tensor(0.3)
    for group in job.adam.param_groups:  # one tensor in both
        group["lr"] = rate
    job.kept.capture(), job.kept.capture()
    rate.fill_(0.5)


def _groups_in_dictionaries_that_are_reordered_unseen(job: Job) -> None:
    groups = job.adam.param_groups
    groups[:] = [OrderedDict(group) for group in groups]  # type: ignore[list-item]
    job.kept.capture(), job.kept.capture()
    groups[0].move_to_end("lr")  # type: ignore[attr-defined]


def _parts_in_dictionaries_that_are_reordered_unseen(job: Job) -> None:
    job.net._modules = OrderedDict(job.net._modules)
    job.kept.capture(), job.kept.capture()
    job.net._modules.move_to_end("first")


def _a_state_that_is_reordered_unseen(job: Job) -> None:
    weight = job.net.first.weight
    job.adam.state[weight] = OrderedDict(job.adam.state[weight])
    job.kept.capture(), job.kept.capture()
    job.adam.state[weight].move_to_end("step")


def _another_optimizer_of_the_same_objects(job: Job) -> None:
    class Counting(torch.optim.AdamW):
        def state_dict(self) -> Any:
            return {**super().state_dict(), "n": 1}

    job.adam.__class__ = Counting


def _shared_memory(job: Job) -> None:
    """Two parameters that are views of one piece, and begin within it."""
    whole = torch.arange(100.0)
    job.net.first.weight.data, job.net.last[1].weight.data = whole[7:31].view(6, 4), whole[19:43].view(4, 6)


def _an_average_in_a_parameters_memory(state: dict[str, Any]) -> None:
    state["exp_avg"].data = state["exp_avg_sq"].data


def _other_numbers_of_numpy(job: Job) -> None:
    before = np.random.mtrand._rand._bit_generator
    try:
        np.random.set_bit_generator(np.random.Philox(3))
        job.kept.capture(), np.random.rand(3)
        kept, first = job.kept.capture(), job.first().capture()
        assert facts(kept) == facts(first)
    finally:
        np.random.set_bit_generator(before)


CHANGES: dict[str, Callable[[Job], Any]] = {
    "a mode that is told elsewhere": _a_mode_that_is_told_elsewhere,
    "parts that a part lists itself": _parts_that_a_part_lists_itself,
    "a dictionary in a group": _a_dictionary_in_a_group,
    "a rate that is filled anew": _a_rate_that_is_filled_anew,
    "groups that are reordered unseen": _groups_in_dictionaries_that_are_reordered_unseen,
    "parts that are reordered unseen": _parts_in_dictionaries_that_are_reordered_unseen,
    "a state that is reordered unseen": _a_state_that_is_reordered_unseen,
    "another optimizer of the same objects": _another_optimizer_of_the_same_objects,
    "other numbers of numpy": _other_numbers_of_numpy,
    "memory that two parameters share": _shared_memory,
    "memory that two averages share": _state(_an_average_in_a_parameters_memory),
    "memory from set_": _data(lambda t: torch.empty(0).set_(torch.arange(40.0).untyped_storage(), 8, (6, 4))),  # type: ignore[call-overload]
    "no elements, of memory that has some": _data(lambda t: torch.ones(4, 4)[:0]),
    "one element for all": _data(lambda t: torch.ones(1).expand(6, 4)),
    "a negation put off": _data(lambda t: torch._neg_view(t)),
    "an average that a step is to tell the gradient of": _state(lambda s: s["exp_avg"].requires_grad_()),
    "a parameter in a state": lambda job: job.adam.state[job.net.first.weight].update(own=job.net.first.weight),
    "complex": _state(lambda s: s.update(exp_avg=s["exp_avg"] * 1j)),
    "nothing left of an average": _state(lambda s: s["exp_avg"].resize_(0)),
    "a set in a group": lambda job: job.adam.param_groups[0].update(seen={1, 2}),
    "nothing": lambda job: None,
    "parameters swapped for a while": _swapped_for_a_while,
    "a list in a group": _a_list_in_a_group,
    "frozen where nothing is trained": _frozen_where_nothing_is_trained,
    "a state_dict hook for a while": _a_hook_for_a_while,
    "an object that changes": _an_object_that_changes,
    "drawn from torch": lambda job: torch.rand(3),
    "drawn from numpy": lambda job: np.random.rand(3),
    "half a pair drawn from numpy": lambda job: np.random.standard_normal(),
    "drawn from random": lambda job: random.random(),
    "half a pair drawn from random": lambda job: random.gauss(0, 1),
    "gradients of zeros left": lambda job: (job.net(torch.randn(5, 4)).sum().backward(), job.adam.zero_grad(False)),
    "a buffer of other memory": lambda job: setattr(job.net.norm.running_mean, "data", torch.ones(6)),
    "a buffer of another dtype": lambda job: setattr(job.net.norm.running_mean, "data", torch.ones(6).double()),
    "evaluating and training again": lambda job: (job.net.eval(), job.net.train()),
    "a state_dict loaded": lambda job: job.adam.load_state_dict(job.adam.state_dict()),
    "states in another dictionary": lambda job: setattr(job.adam, "state", defaultdict(dict, job.adam.state)),
    "a step": lambda job: job.step(),
    "other memory": _data(torch.clone),
    "another shape": _data(lambda t: t[:, :2].clone()),
    "another dtype": _data(lambda t: t.double()),
    "other strides": _data(lambda t: t.t().contiguous().t()),
    "frozen": lambda job: job.net.first.weight.requires_grad_(False),
    "a gradient left": lambda job: job.net(torch.randn(5, 4)).sum().backward(),
    "evaluating": lambda job: job.net.norm.eval(),
    "a buffer replaced": lambda job: setattr(job.net, "seen", torch.ones(3)),
    "a buffer grown": lambda job: job.net.seen.resize_(5).fill_(2),
    "a buffer come": lambda job: setattr(job.net, "later", torch.ones(1)),
    "a buffer gone": lambda job: setattr(job.net, "seen", None),
    "a buffer under another name": _rename,
    "a buffer that is stored now": lambda job: job.net._non_persistent_buffers_set.clear(),
    "a parameter tied": _tie,
    "parameters in another order": _swap_places,
    "a part replaced": lambda job: setattr(job.net.last, "0", nn.Tanh()),
    "a part come": lambda job: job.net.add_module("more", nn.BatchNorm1d(2, affine=False)),
    "a part under another name": lambda job: job.net.last.add_module("9", job.net.last._modules.pop("0")),
    "ignored by DDP": lambda job: setattr(job.net, "_ddp_params_and_buffers_to_ignore", ["first.weight"]),
    "keys through a hook": lambda job: job.net.norm.register_state_dict_post_hook(lambda *a: a[1].clear()),
    "keys through a method": lambda job: setattr(job.net, "state_dict", lambda **_: {"x": job.net.first.bias}),
    "a part of another class": _another_class,
    "names that are stored in another set": lambda job: setattr(job.net, "_non_persistent_buffers_set", set()),
    "other attributes altogether": _other_attributes,
    "another shape under the same strides": _other_shape_same_strides,
    "buffers that the module lists itself": _buffers_of_its_own,
    "an optimizer with a state_dict of its own": _a_state_dict_of_its_own,
    "a number changed": lambda job: setattr(job.net, "count", 2),
    "a number that is equal and another": lambda job: setattr(job.net, "count", True),
    "a number of another part": lambda job: setattr(job.net.norm, "momentum", 0.25),
    "attributes swapped": _swap_attributes,
    "an attribute come": lambda job: setattr(job.net.first, "extra", "x"),
    "a tuple changed": lambda job: setattr(job.net, "shape", (2, (4, None))),
    "a list that grew": lambda job: job.net.names.append("b"),
    "a tensor in an attribute": lambda job: job.net.held.add_(1),
    "a function that is a number now": lambda job: setattr(job.net, "act", 3),
    "the rate": lambda job: job.adam.param_groups[1].update(lr=0.3),
    "the rate as a tensor": lambda job: job.adam.param_groups[0].update(lr=torch.tensor(0.3)),
    "an option come": lambda job: job.adam.param_groups[0].update(extra=(1, 2)),
    "groups of other parameters": lambda job: job.adam.param_groups[1]["params"].reverse(),
    "a group come": lambda job: job.adam.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "a state replaced": _state(lambda s: s.update(exp_avg=torch.ones(6, 4))),
    "a state of another shape": _state(lambda s: s["exp_avg"].resize_(3)),
    "a state transposed": _state(lambda s: s["exp_avg"].t_()),
    "a state of other memory": _state(lambda s: setattr(s["exp_avg"], "data", torch.ones(6, 4))),
    "a state of another dtype": _state(lambda s: setattr(s["exp_avg"], "data", torch.ones(6, 4).double())),
    "a state come": _state(lambda s: s.update(more=torch.ones(3))),
    "a number in a state": _state(lambda s: s.update(more=7)),
    "a list in a state": _state(lambda s: s.update(more=[torch.ones(1)])),
    "a state gone": _state(lambda s: s.pop("step")),
    "all state gone": lambda job: job.adam.state.clear(),
    "states exchanged": _state(_exchange_values),
    "states in another order": _reorder_state,
    "states of one form in another order": _reorder_states_of_one_form,
    "another number in a state": _another_number_in_a_state,
    "state that is no parameter's": lambda job: job.adam.state.update({"total": 3}),
    "a state_dict through a hook": lambda job: job.adam.register_state_dict_post_hook(lambda o, s: {**s, "n": 1}),
}


@pytest.mark.parametrize("kind", ["equal", "rank", "fixed"])
@pytest.mark.parametrize("name", CHANGES)
def test_cached_save_after_any_change_equals_first_save(name: str, kind: str) -> None:
    job = Job(kind)
    if kind == "fixed" and name in ("a list that grew", "a tensor in an attribute"):
        return  # it has none
    CHANGES[name](job)
    for _ in range(2):  # what the changed one has made is kept, too
        kept, first = job.kept.capture(), job.first().capture()
        assert facts(kept) == facts(first)
        written = job.copied(kept, job.lister, job.staging, job.cuts)
        assert written == job.copied(first, Lister(1), Staging(CPU), Cuts())
    if name in ("nothing", "a step", "parameters swapped for a while", "evaluating and training again"):
        again = job.kept.capture()  # if nothing was kept, this test would prove nothing
        assert kept.sizes() is again.sizes() and kept.state["optimizer"] is again.state["optimizer"]
        assert kept.state["modules"] is again.state["modules"]


@pytest.mark.parametrize("seed", range(int(os.environ.get("RATCHET_TEST_CHANGES", "8"))))
def test_cached_save_after_change_sequences_equals_first_save(seed: int) -> None:
    drawn = random.Random(seed)
    job = Job(drawn.choice(["equal", "fixed", "fixed", "rank"]))
    for name in drawn.choices([*CHANGES], k=12):
        try:
            CHANGES[name](job)
        except (
            AttributeError,
            LookupError,
            RuntimeError,
            StopIteration,
            ValueError,
            UserError,
            StateError,
            UserWarning,
        ):
            continue  # what was changed before does not allow it
        for _ in range(drawn.choice([1, 1, 2])):
            kept, first = (_facts_or_error(state) for state in (job.kept, job.first()))
            assert kept == first, name


def _facts_or_error(state: JobState) -> object:
    try:
        return facts(state.capture())
    except (UserError, StateError) as error:
        return str(error)


def _replace(job: Job) -> None:
    job.net.first.weight = nn.Parameter(job.net.first.weight.detach())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_replace, "first.weight was replaced"),
        (lambda job: job.net.register_parameter("more", nn.Parameter(torch.ones(1))), "more was added"),
        (lambda job: delattr(job.net.first, "bias"), "first.bias was taken out"),
    ],
)
def test_parameter_unknown_to_ddp_is_refused_by_cached_save(change: Any, text: str) -> None:
    job = Job()
    change(job)
    with pytest.raises(UserError, match=text):
        job.kept.capture()


def test_unfrozen_parameter_is_refused_by_cached_save() -> None:
    job = Job()
    job.net.first.weight.requires_grad_(False)
    kept = job._rank()
    kept.capture(), kept.capture()
    job.net.first.weight.requires_grad_()
    with pytest.raises(UserError, match=r"first\.weight was unfrozen"):
        kept.capture()


def test_change_during_copy_of_cached_save_is_reported() -> None:
    job = Job()
    snapshot = job.kept.capture()
    assert isinstance(snapshot.shared, LiveTensors)  # else this is nothing new
    staged = job.staging.stage(Lister(0).list_sources(snapshot, job.cuts.plan(snapshot.sizes(), 1)[0]))
    with torch.no_grad():
        job.net.last[1].weight.add_(1)
    staged.copy(Until.BACKWARD), staged.copy(Until.STEP)
    assert staged.error is not None and "last.1.weight" in str(staged.error)


class Odd(torch.Tensor):
    """No tensor that a checkpoint could hold."""


def test_tensor_changed_to_unsupported_class_is_refused_by_cached_save() -> None:
    job = Job()
    job.adam.state[job.net.first.weight]["exp_avg"].__class__ = Odd
    for state in (job.kept, job.first()):
        with pytest.raises(UserError, match="Odd"):
            state.capture()


@pytest.mark.parametrize("make", [torch.clone, lambda t: t.t().contiguous().t()], ids=["row-major", "transposed"])
def test_parameter_with_replaced_memory_before_copy_is_saved_correctly(make: Any) -> None:
    """Binarized networks keep real weights so: ``parameter.data = parameter.data.sign()`` in the forward pass."""
    job = Job()
    weight, state = job.net.last[1].weight, job.adam.state[job.net.last[1].weight]
    for tensor in (weight, state["exp_avg"]):
        tensor.data = make(tensor.data)
    right = [flat(t).clone() for t in (weight, state["exp_avg"])]
    snapshot = job.kept.capture()
    plan = job.cuts.plan(snapshot.sizes(), 1)
    staged = job.staging.stage(Lister(0).list_sources(snapshot, plan[0]))
    for tensor in (weight, state["exp_avg"]):
        tensor.data = torch.full_like(tensor.data, 7.0)
    gc.collect()
    filler = [torch.full((6, 4), 9.0) for _ in range(1000)]  # in the memory that nobody else had needed
    staged.finish()
    names = ["model/last.1.weight", "optimizer/last.1.weight/exp_avg"]
    ranges = staged.ranges("shared/", [s for s in plan[0] if s.name in names])
    data = staged.data_to_write()[1]
    assert [bytes(data[begin:end]) for begin, end in ranges] == [bytes(byte_view(one)) for one in right]
    assert [bytes(byte_view(flat(snapshot.shared[name]))) for name in names] == [bytes(byte_view(one)) for one in right]
    found = slice_digests([s for s in plan[0] if s.name in names], snapshot.shared)
    assert found == [xxhash.xxh3_128_hexdigest(byte_view(one)) for one in right] and filler


def test_caches_do_not_keep_released_tensors_alive() -> None:
    """An optimizer that makes new tensors in every step must not need the memory of two states."""
    job = Job()
    old = [weakref.ref(job.net.seen), weakref.ref(job.adam.state[job.net.first.weight]["exp_avg"])]
    job.net.seen = torch.ones(3)
    job.adam.state[job.net.first.weight]["exp_avg"] = torch.ones(6, 4)
    memory = [
        StorageWeakRef(t.untyped_storage()) for t in (job.net.first.bias, *job.sgd.state[job.net.first.weight].values())
    ]
    job.net.first.bias.data = torch.ones(6)
    job.sgd.state = defaultdict(dict)
    gc.collect()
    assert [one() for one in old] == [None, None] and all(one.expired() for one in memory)


def test_lister_reuses_source_list_while_nothing_changes() -> None:
    lister, tensors = Lister(0), {"model/a": torch.ones(4), "model/b": torch.ones(3)}
    slices = plan_slices([(name, t.numel(), 4) for name, t in tensors.items()], 2)[0]
    one = Snapshot(shared=tensors, private={"rng/torch": torch.zeros(2)})
    found = lister.list_sources(one, slices)
    other = Snapshot(shared={n: t + 1 for n, t in tensors.items()}, private={"rng/torch": torch.ones(2)})
    other.known_sizes = one.sizes()
    again = lister.list_sources(other, slices)
    last = again.entries[-1]
    assert again.layout_key is found.layout_key and last.tensor.data_ptr() == other.private["rng/torch"].data_ptr()
    assert last == Source("rank/0/rng/torch", last.tensor, 0, 2, Until.BOUNDARY)
    other.private["rng/torch"] = torch.ones(4)[::2]  # of the same shape, in another order in memory
    assert lister.list_sources(other, slices).layout_key is not found.layout_key
    other.private["rng/torch"] = torch.ones(3)
    assert lister.list_sources(other, slices).layout_key is not found.layout_key
