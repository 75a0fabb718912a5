"""What comes back with a module and an optimizer besides tensors, and what is refused before anything is trained with it."""

from __future__ import annotations

import re
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ratchet_contract.errors import StateError, UserError
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.state import model, module_baseline, module_extras, object_walk
from ratchet_worker.state import optimizer as optimizer_state
from ratchet_worker.state.module_baseline import check_parameters_unchanged, is_compiled, origin
from ratchet_worker.state.snapshot import Snapshot


class Calibrated(nn.Linear):
    """State that is neither parameter nor buffer."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "peak": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Calibrated(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _through_a_checkpoint(value: object) -> Any:
    snapshot = Snapshot()
    snapshot.add("modules", value)
    return snapshot.value("modules")


def test_modes_frozen_parameters_extra_state_and_gradients_are_restored() -> None:
    net = _net()
    before = origin(net)
    net(torch.ones(5, 3)).sum().backward()
    net[1].eval()
    net[2].weight.requires_grad_(False)
    net[0].seen = 7
    net[2].weight.grad = None
    net[1].weight.grad.zero_()
    state = _through_a_checkpoint(module_extras.capture(net, before))

    other = _net()
    other[2].weight.grad = torch.ones(2, 4)
    module_extras.restore(other, state)
    assert [m.training for m in other.modules()] == [m.training for m in net.modules()]
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in net.parameters()]
    assert other[0].seen == 7
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad))

    # DDP was built for other parameters: what it trains is not changed behind its back.
    again = _net()
    module_extras.restore(again, state, frozen=False)
    assert all(p.requires_grad for p in again.parameters()) and not again[1].training
    with pytest.raises(StateError, match="extra state of '0'"):
        module_extras.restore(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), state)
    with pytest.raises(StateError, match=r"'1.*the model has no longer"):
        module_extras.restore(nn.Sequential(Calibrated(3, 4)), state)


@pytest.mark.parametrize("zero", [0j, complex(0.0, -0.0)], ids=["zero", "negative zero"])
def test_complex_gradient_of_zeros_is_restored(zero: complex) -> None:
    net, other = (nn.Linear(2, 2, bias=False, dtype=torch.complex64) for _ in range(2))
    net.weight.grad = torch.full((2, 2), zero)
    module_extras.restore(other, _through_a_checkpoint(module_extras.capture(net, origin(net))))
    assert other.weight.grad is not None and other.weight.grad.dtype is torch.complex64
    assert torch.equal(*(torch.view_as_real(one.weight.grad).signbit() for one in (net, other)))


class Restless(nn.Module):
    """What models do to themselves in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("late", None)
        self.register_buffer("grows", torch.zeros(1), persistent=False)
        self.register_buffer("drops", torch.zeros(1))
        self.calls, self.temperature, self.mode = 0, 1.0, "warm"
        self.hidden: Any = None
        self.losses: list[float] = []
        self.weights = [self.inner.weight]
        self.view = self.inner.bias.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        self.calls, self.temperature, self.mode = self.calls + 1, self.temperature * 0.9, "cold"
        self.late = out.detach().clone()
        self.grows = torch.cat([self.grows, torch.ones(1)])
        self.drops = None
        self.inner.register_buffer("own", torch.full((3,), float(self.calls)), persistent=False)
        self.aux = out.sum()  # with a graph: it belongs to this step
        self.hidden = (out.detach(), 1)
        self.losses.append(float(self.aux.detach()))
        return out


def _begun(net: nn.Module) -> JobState:
    """As before the first step."""
    job = JobState(0, torch.device("cpu"))
    job.set_model(SimpleNamespace(module=net), SimpleNamespace())  # type: ignore[arg-type]
    job.begin()
    return job


def _saved(net: nn.Module, job: JobState) -> Snapshot:
    saved = Snapshot()
    saved.add_encoded("buffers", {name: b.clone() for name, b in net.named_buffers()}, [])
    saved.add("modules", module_extras.capture(net, job._origin))
    job._add_hidden(saved)
    return saved


def _restored(net: nn.Module, job: JobState, saved: Snapshot) -> None:
    model.restore_buffers(net, saved, relayout=False)
    assert all(report.status == "exact" for report in job._restore_hidden(saved))


def _restless() -> tuple[Restless, JobState]:
    net = Restless()
    return net, _begun(net)


def test_changed_buffers_and_attributes_are_restored_or_named() -> None:
    net, job = _restless()
    fresh = module_extras.capture(net, job._origin)
    assert not any(fresh[key] for key in ("made", "gone"))
    net(torch.ones(1, 2)), net(torch.ones(1, 2))
    with torch.no_grad():
        net.inner.bias.add_(1)  # an optimizer's step: what looks at a parameter is no state of its own
    net.moved = iter([1])
    saved = _saved(net, job)
    other, again = _restless()
    _restored(other, again, saved)
    assert str((other.hidden, other.losses)) == str((net.hidden, net.losses)) and torch.equal(other.aux, net.aux)
    assert (other.calls, other.mode) == (2, "cold") and other.temperature == net.temperature
    found, wanted = dict(other.named_buffers()), dict(net.named_buffers())
    assert list(found) == list(wanted) == ["late", "grows", "inner.own"] and other.drops is None
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert list(other.state_dict()) == list(net.state_dict())
    [report] = again._report_unsaved(saved)
    assert report.status == "not-exact" and "model.moved changed in training" in str(report.reason)
    gone = Snapshot(private={"buffers/head.late": torch.ones(1)}, state={"buffers": []})
    gone.add("modules", {**module_extras.capture(net, job._origin), "made": {"head.late": True}})
    with pytest.raises(StateError, match=r"'head\.late', which the model has no longer"):
        model.restore_buffers(other, gone, relayout=False)


def test_too_many_objects_are_reported_with_the_path_whose_exclusion_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_walk, "_MAX_OBJECTS", 60)

    def begun(*ignored: str) -> JobState:
        net = Restless()
        net.few, net.items = [[n] for n in range(5)], [{"tokens": [n]} for n in range(50)]
        job = JobState(0, torch.device("cpu"), strict=True)
        job.hidden.ignored = dict.fromkeys(ignored, "never changes")
        job.set_model(SimpleNamespace(module=net), SimpleNamespace())  # type: ignore[arg-type]
        job.begin()
        return job

    with pytest.raises(UserError, match="were not looked at") as caught:
        begun()._add_hidden(Snapshot())
    assert "changed in training" not in caught.value.detail
    [path] = re.findall(r"session\.ignore\('(.*?)', 'why'\)", caught.value.detail)
    assert path == "model.items"
    begun(path)._add_hidden(Snapshot())


class Raising:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("closed")


def test_advice_on_an_object_that_raises_names_a_path_whose_exclusion_helps() -> None:
    net = Restless()
    net.handle = Raising()
    job = _begun(net)
    saved = _saved(net, job)
    [report] = job._report_unsaved(saved)
    assert "model.handle (raises when it is inspected)" in str(report.reason)
    assert "session.ignore('model.handle', 'why')" in str(report.reason)


class Tied(nn.Module):
    """Buffers under several names, or looked at by others, and what ``change`` does to them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(2))
        self.inner.register_buffer("table", self.table)
        self.inner.register_buffer("head", self.table[:1])
        self.register_buffer("other", torch.zeros(2))
        self.cache = self.table

    def change(self, how: str) -> None:
        if how in ("resize", "both"):
            self.table.resize_(4).fill_(3.0)
        if how == "same shape":
            self.table.data = torch.ones(2)
        if how == "data":
            self.table.data = torch.full((3,), 3.0)
        if how in ("replace one", "both"):
            self.table = torch.ones(2)
        if how == "replace all":
            self.table = self.inner.table = torch.ones(3)
        if how == "move":
            self.other = self.table
        if how == "swap":
            self.table, self.other = self.other, self.table

    def seen(self) -> list[list[float]]:
        """All values, behind a step in every buffer."""
        for number, buffer in enumerate([self.table, self.inner.table, self.inner.head, self.other]):
            buffer.add_(number + 1.0)
        return [t.tolist() for t in (self.table, self.inner.table, self.inner.head, self.other)]


@pytest.mark.parametrize("how", ["resize", "data", "same shape", "replace one", "replace all", "move", "swap", "both"])
def test_shared_buffers_are_restored_as_shared(how: str) -> None:
    net, other = Tied(), Tied()
    job, again = _begun(net), _begun(other)
    net.change(how)
    saved = _saved(net, job)
    _restored(other, again, saved)
    assert list(other.named_buffers()) and [n for n, _ in other.named_buffers()] == [n for n, _ in net.named_buffers()]
    assert other.seen() == net.seen()
    assert torch.equal(other.cache, net.cache) and (other.cache is other.table) == (net.cache is net.table)
    assert saved.value("attributes")["unsaved"] == []
    if how in ("resize", "data"):
        assert other.cache is other.table and other.table.shape == net.table.shape


def _look_into(net: Tied) -> None:
    net.other = net.table[:1]


def _look_into_new(net: Tied) -> None:
    net.table, net.other = torch.zeros(6).split(3)


def _share_data(net: Tied) -> None:
    net.other.data = net.table.data


def _look_at_a_buffer(net: Tied) -> None:
    net.cache = net.other


def _look_at_a_new_buffer(net: Tied) -> None:
    net.table = net.inner.table = net.cache = torch.ones(2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_look_into, "buffer other was moved into another tensor's memory"),
        (_look_into_new, "buffer other, table was moved into another tensor's memory"),
        (_share_data, "buffer other was moved into another tensor's memory"),
    ],
)
def test_new_view_into_buffer_memory_is_reported_not_exact(change: Any, told: str) -> None:
    net, job = Tied(), JobState(0, torch.device("cpu"))
    before = module_baseline.origin(net)
    change(net)
    saved = Snapshot()
    saved.add("modules", module_extras.capture(net, before))
    [report] = job._report_unsaved(saved)
    assert report.status == "not-exact" and told in str(report.reason)


@pytest.mark.parametrize("change", [_look_at_a_buffer, _look_at_a_new_buffer])
def test_attribute_referring_to_buffer_is_restored_as_reference(change: Any) -> None:
    net, other = Tied(), Tied()
    job, again = _begun(net), _begun(other)
    change(net)
    _restored(other, again, _saved(net, job))
    assert (other.cache is other.table, other.cache is other.other) == (net.cache is net.table, net.cache is net.other)


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Odd(nn.Linear):
    """Attributes of unusual types, and one that stands beside a property of the class."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.level, self.scale = Level.LOW, np.float64(1)
        vars(self)["gain"] = 1

    @property
    def gain(self) -> int:
        return int(vars(self)["gain"])


def test_enum_and_numpy_attributes_are_restored() -> None:
    net, other = Odd(), Odd()
    job, again = _begun(net), _begun(other)
    net.level, net.scale = Level.HIGH, np.float64(2)
    vars(net)["gain"] = 2
    saved = Snapshot()
    job._add_hidden(saved)
    again._restore_hidden(saved)
    assert (other.gain, other.level, other.scale) == (2, Level.HIGH, np.float64(2)) and type(other.scale) is np.float64


def _add(net: nn.Sequential) -> None:
    net[2].extra = nn.Parameter(torch.ones(1))


def _replace(net: nn.Sequential) -> None:
    net[2].weight = nn.Parameter(torch.ones(2, 4))


def _drop(net: nn.Sequential) -> None:
    net[2].bias = None


def _unfreeze(net: nn.Sequential) -> None:
    net[1].weight.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_add, r"2\.extra was added to"),
        (_replace, r"2\.weight was replaced"),
        (_drop, r"2\.bias was taken out of"),
        (_unfreeze, r"1\.weight was unfrozen"),
    ],
)
def test_a_parameter_that_ddp_does_not_know_is_refused_by_name(change: Any, text: str) -> None:
    net = _net()
    net[1].weight.requires_grad_(False)
    before = origin(net)
    net[0].weight.requires_grad_(False)  # to freeze one is no fault
    check_parameters_unchanged(net, before)
    change(net)
    with pytest.raises(UserError, match=text):
        check_parameters_unchanged(net, before)


def test_a_gradient_of_negative_zeros_is_not_one_of_zeros() -> None:
    net, other = nn.Linear(1, 2), nn.Linear(1, 2)
    net.weight.grad, net.bias.grad = torch.tensor([[-0.0], [0.0]]), torch.zeros(2)
    module_extras.restore(other, _through_a_checkpoint(module_extras.capture(net, origin(net))))
    assert torch.signbit(other.weight.grad).tolist() == [[True], [False]] and not torch.signbit(other.bias.grad).any()


class Counting(torch.optim.SGD):
    """Keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.state["steps"] = self.state.get("steps", 0) + 1


def test_optimizer_state_without_parameter_is_restored() -> None:
    net = _net()
    optimizer = Counting(net.parameters(), 0.1, momentum=0.9)
    net(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    names = {id(p): n for n, p in net.named_parameters()}
    shared, rest = optimizer_state.capture(optimizer, "optimizer", names, list(names.values()))

    other = _net()
    again = Counting(other.parameters(), 0.1, momentum=0.9)
    named = {id(p): n for n, p in other.named_parameters()}
    optimizer_state.restore(again, "optimizer", named, shared, _through_a_checkpoint(rest))
    assert again.state["steps"] == 1 and len(again.state) == len(optimizer.state)


def _job(net: nn.Module) -> JobState:
    state: Any = JobState(0, torch.device("cpu"))
    state.ddp, state.hook = SimpleNamespace(module=net), object()
    return state  # type: ignore[no-any-return]


def test_optimizer_parameter_outside_saved_modules_is_refused() -> None:
    net, head = _net(), nn.Linear(2, 2)
    state = _job(net)
    state.register("optimizer", torch.optim.SGD([*net.parameters(), *head.parameters()], 0.1))
    with pytest.raises(UserError, match=r"number 6 \[2, 2\] is not in the wrapped model"):
        state.check_parameters_covered()
    state.register("user:head", head)
    state.check_parameters_covered()


@pytest.mark.parametrize("name", ["", "user:a/b"])
def test_ambiguous_component_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="not a valid name"):
        _job(_net()).register(name, nn.Linear(1, 1))


def test_compiled_submodule_is_detected_at_any_depth() -> None:
    assert not is_compiled(_net())
    inner, outer = _net(), _net()
    inner[2].compile(backend="eager")
    assert is_compiled(inner) and is_compiled(nn.Sequential(torch.compile(outer, backend="eager")))
