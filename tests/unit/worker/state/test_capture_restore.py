"""What a rank captures and puts back: generators, optimizers, environment facts."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ratchet_contract.errors import StateError, UserError
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.encode import encode
from ratchet_worker.checkpoint import late_changes
from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.coordination.process_group import _dup_and_close
from ratchet_worker.data.data_generators import OwnGenerators
from ratchet_worker.state import environment, rng
from ratchet_worker.state import optimizer as optimizer_state
from ratchet_worker.state.snapshot import Snapshot, digest
from ratchet_worker.task import Parts
from ratchet_worker.training.evaluation import preserving_state
from ratchet_worker.training.task_loop import check_parts

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_generators() -> Any:
    with rng.fork_rng(CPU):
        yield


def _draw() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
        np.random.standard_normal(3).tolist(),
        random.gauss(0, 1),
        random.random(),
    ]


def _through_a_checkpoint(value: object) -> Any:
    snapshot = Snapshot()
    snapshot.add("it", value)
    return snapshot.value("it")


def test_generators_differ_by_rank_and_restore_mid_gaussian_pair() -> None:
    rng.seed_all(5, 0)
    first = _draw()
    rng.seed_all(5, 1)
    assert all(a != b for a, b in zip(_draw(), first, strict=True))
    rng.seed_all(5, 0)
    assert _draw() == first
    np.random.standard_normal(), random.gauss(0, 1)  # both keep the other half of a pair
    state = _through_a_checkpoint(rng.capture(CPU))
    following = _draw()
    rng.seed_all(9, 9)
    rng.restore(state, CPU)
    assert _draw() == following


def test_rng_forked_restores_generators_even_after_exception() -> None:
    rng.seed_all(1, 0)
    expected = _draw()
    rng.seed_all(1, 0)
    with pytest.raises(ZeroDivisionError), rng.fork_rng(CPU):
        _draw()
        raise ZeroDivisionError
    assert _draw() == expected


class Drawing:
    """An object whose state is new numbers."""

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": _draw()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("call", [JobState.capture, JobState.on_evaluation_begin, JobState.require_storable])
def test_draws_of_a_state_dict_are_undone(call: Callable[[JobState], object]) -> None:
    ddp = SimpleNamespace(module=nn.Linear(2, 2), require_forward_param_sync=True)
    job = JobState(0, CPU)
    job.set_model(ddp, SimpleNamespace(replicas="equal", capture=lambda *, copy: ({}, {})))  # type: ignore[arg-type]
    job.register("mine", Drawing())
    job.begin()
    with rng.fork_rng(CPU):
        expected = _draw()
    call(job)
    with rng.fork_rng(CPU):
        assert _draw() == expected
    rng.restore(job.capture().value("rng"), CPU)
    assert _draw() == expected


def _other_numpy_generator() -> None:
    np.random.set_bit_generator(np.random.PCG64(7))


DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "torch": lambda: torch.rand(1),
    "numpy": lambda: np.random.random(),
    "the cached half of numpy's pair": lambda: np.random.standard_normal(),
    "python": lambda: random.random(),
    "the cached half of Python's pair": lambda: random.gauss(0, 1),
    "another generator of numpy": _other_numpy_generator,
}


@pytest.mark.parametrize("inside", [*DRAWS])
@pytest.mark.parametrize("before", [*DRAWS])
def test_each_save_has_the_generators_as_they_are_and_leaves_them_so(before: str, inside: str) -> None:
    kept = np.random.get_bit_generator()
    try:
        np.random.standard_normal(), random.gauss(0, 1)  # both keep the other half of a pair
        generators = rng.Capture(CPU)
        with generators.fork():
            pass
        DRAWS[before]()
        expected = rng.capture(CPU)
        with generators.fork() as state:
            assert _parts(state) == _parts(expected)
            if inside != "another generator of numpy":  # which no restore undoes
                DRAWS[inside]()
        assert _parts(rng.capture(CPU)) == _parts(expected)
    finally:
        np.random.set_bit_generator(kept)


def _parts(state: dict[str, Any]) -> list[Any]:
    tensors, data = encode(state, root="rng")
    return [data, *(tensor.tolist() for tensor in tensors.values())]


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: np.random.default_rng(3), lambda g: g.standard_normal(5).tolist()),
        (lambda: np.random.default_rng(3), lambda g: [child.random() for child in g.spawn(2)]),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.integers(0, 9, 5).tolist()),
        (lambda: np.random.RandomState(3), lambda g: g.randn(5).tolist()),
        (lambda: torch.Generator().manual_seed(3), lambda g: torch.randn(5, generator=g).tolist()),
    ],
)
def test_registered_generators_continue_after_restore(make: Any, draw: Any) -> None:
    generator = make()
    draw(generator)
    state = _through_a_checkpoint(rng.GeneratorState(generator).state_dict())
    expected = draw(generator)
    other = make()
    rng.GeneratorState(other).load_state_dict(state)
    assert draw(other) == expected


def test_a_checkpoint_of_a_gpu_rank_is_refused_on_a_cpu() -> None:
    state = rng.capture(CPU) | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    with pytest.raises(HookStateError, match="written with a CUDA device"):
        rng.restore(state, CPU)


class Momentum(torch.optim.Optimizer):
    """Float32 momentum of bfloat16 parameters, and a number per parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["momentum"] = state.get("momentum", torch.zeros(p.shape)) * 0.9 + p.grad.float()
                state["count"] = state.get("count", 0) + 1
                p -= (group["lr"] * state["momentum"]).to(p.dtype)


class Past(Momentum):
    """Float32 tensors deep in the state: ``load_state_dict`` casts those to the parameter's dtype, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p, state in self.state.items():
            state["past"] = [*state.get("past", []), {"both": (p.grad.float() / 3, 1.5)}]
            p -= sum(item["both"][0] for item in state["past"]).to(p.dtype)


def _trained(make: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(16, 3))
    if make in (Momentum, Past):
        model = model.bfloat16()
    optimizer = make(model.parameters())
    for _ in range(3):
        _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 2, 4, 4, dtype=dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "make",
    [
        Momentum,
        Past,
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
        lambda p: torch.optim.Adam(p, 0.01, fused=True),
        lambda p: torch.optim.Adagrad(p, 0.01),
    ],
)
def test_restored_optimizer_continues_bit_exact_with_dtypes_and_strides(make: Any) -> None:
    model, optimizer = _trained(make, 0)
    names = {id(p): n for n, p in model.named_parameters()}
    shared, rest = optimizer_state.capture(optimizer, "optimizer", names, list(names.values()))
    shared = {n: t.clone(memory_format=torch.contiguous_format) for n, t in shared.items()}
    assert {n.split("/")[1] for n in shared} == set(names.values())
    rest = _through_a_checkpoint(rest)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    _step(model, optimizer)

    other, again = _trained(make, 1)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
    optimizer_state.restore(again, "optimizer", {id(p): n for n, p in other.named_parameters()}, shared, rest)
    _step(other, again)
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    assert digest(p for p, _ in pairs) == digest(q for _, q in pairs)
    for p, q in pairs:
        for key, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                found = again.state[q][key]
                assert torch.equal(found, value) and found.dtype == value.dtype and found.stride() == value.stride()
            elif key == "past":
                pasts = [item["both"] for item in value], [item["both"] for item in again.state[q][key]]
                assert all(torch.equal(a, b) and a.dtype is b.dtype for (a, _), (b, _) in zip(*pasts, strict=True))
            else:
                assert again.state[q][key] == value


def test_restored_optimizer_has_the_recorded_containers_and_strings() -> None:
    """``load_state_dict`` makes ``str(generator)`` of a string, and other classes and dtypes of what containers hold."""
    model, optimizer = _trained(Momentum, 0)
    names = {id(p): n for n, p in model.named_parameters()}
    for state in optimizer.state.values():
        state["mode"], state["name"], state["size"] = "warm", [b"raw", ("a", {"b": "c"})], torch.Size([2, 3])
        state["last"] = deque([torch.ones(2) / 3, torch.zeros(2)], maxlen=2)
        state["counts"], state["order"] = defaultdict(int, a=1), OrderedDict(b=torch.ones(1) / 3)
        state["seen"] = Counter("aab")
    shared, rest = optimizer_state.capture(optimizer, "optimizer", names, list(names.values()))
    _, again = _trained(Momentum, 1)
    optimizer_state.restore(again, "optimizer", _names_of(again, names), shared, _through_a_checkpoint(rest))
    for state in again.state.values():
        assert (state["mode"], state["name"]) == ("warm", [b"raw", ("a", {"b": "c"})])
        assert type(state["size"]) is torch.Size and state["size"] == (2, 3)
        state["last"].append(torch.ones(2))
        assert len(state["last"]) == 2 and state["last"][0].dtype is torch.float32
        state["counts"]["new"] += 1
        assert state["counts"] == {"a": 1, "new": 1}
        assert type(state["order"]) is OrderedDict and torch.equal(state["order"]["b"], torch.ones(1) / 3)
        assert state["seen"].most_common(1) == [("a", 2)]


def _names_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[int, str]:
    """``names``, in order, for the parameters of another optimizer of the same form."""
    return dict(zip(map(id, optimizer.param_groups[0]["params"]), names.values(), strict=True))


def test_an_optimizer_over_other_parameters_is_refused_by_name() -> None:
    model, optimizer = _trained(Momentum, 0)
    names = {id(p): n for n, p in model.named_parameters()}
    shared, rest = optimizer_state.capture(optimizer, "optimizer", names, list(names.values()))
    smaller = Momentum(list(model.parameters())[:-1])
    with pytest.raises(StateError, match=r"other parameters .*2\.bias"):
        optimizer_state.restore(smaller, "optimizer", names, shared, rest)
    sharded: Any = type("ZeroRedundancyOptimizer", (Momentum,), {})(model.parameters())
    around = Momentum(model.parameters())
    around.inner = sharded
    for found in (sharded, around):
        with pytest.raises(UserError, match="ZeroRedundancyOptimizer"):
            optimizer_state.check_not_sharded("optimizer", found)


def test_unstorable_state_is_refused_with_key() -> None:
    with pytest.raises(UserError, match=r"user:mine.*handle"):
        Snapshot().add("user:mine", {"fine": 1, "handle": object()})


def test_environment_differences_are_named_with_both_values() -> None:
    recorded = {"threads": 2, "torch": "2.13.0", "gpu": "H200"}
    found = environment.compare(recorded, {"threads": 1, "torch": "2.13.0", "env:MKL_CBWR": "AVX2"})
    assert (
        environment.describe_differences(found) == "env:MKL_CBWR (None -> AVX2), gpu (H200 -> None), threads (2 -> 1)"
    )
    assert environment.compare(recorded, dict(recorded)) == []


class Counting(nn.Module):
    """Counts its calls in a buffer, in eval mode too, as a careless metric does."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.drop(x) * 2


def test_evaluation_restores_modes_buffers_gradients_and_generators() -> None:
    inner = Counting()
    outer: Any = nn.Sequential()
    outer.module, outer.require_forward_param_sync = inner, True
    inner.train()
    inner.drop.eval()  # frozen by the user: stays so
    before = _through_a_checkpoint(rng.capture(CPU))
    hook: Any = SimpleNamespace(averaged_parameters=nullcontext)  # of equal replicas
    noise = np.random.default_rng(3)  # of a data set that is trained with and evaluated, too
    data: Any = SimpleNamespace(own_generators=OwnGenerators({"dataset": SimpleNamespace(noise=noise)}))
    with pytest.raises(ZeroDivisionError), preserving_state(outer, hook, data, CPU, broadcast=False):
        assert not inner.training and not inner(torch.ones(3, requires_grad=True)).requires_grad
        _draw(), noise.random()
        raise ZeroDivisionError
    assert inner.training and not inner.drop.training and inner.calls == 0
    assert torch.equal(rng.capture(CPU)["torch"], before["torch"])
    assert noise.random() == np.random.default_rng(3).random()


def test_rendezvous_socket_is_not_inheritable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        inherited = os.dup(server.fileno())
        os.set_inheritable(inherited, True)
        copy = _dup_and_close(inherited)
        assert copy is not None and not os.get_inheritable(copy)
        os.close(copy)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(inherited if inherited != copy else -1)


def test_rank_dies_when_agent_died_before_die_with_parent() -> None:
    code = (
        "import os; from ratchet_worker.ipc.child_processes import die_with_parent; "
        "die_with_parent(os.getppid() + 1); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def test_impossible_task_parts_are_refused_before_first_step() -> None:
    def parts(**more: Any) -> Parts:
        model = nn.Linear(1, 1)
        optimizer = more.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
        return Parts(model, optimizer, [], total_steps=1, **more)  # type: ignore[arg-type]

    check_parts(parts(accumulate=2), static_graph=False)
    check_parts(parts(), static_graph=True)
    with pytest.raises(UserError, match="drop one of the two"):
        check_parts(parts(accumulate=2), static_graph=True)
    with pytest.raises(UserError, match="LBFGS needs a closure"):
        check_parts(parts(optimizer=torch.optim.LBFGS), static_graph=False)


def test_torch_and_numpy_switches_changed_in_training_are_recorded() -> None:
    before = environment.switches(CPU)
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("high")
    torch.backends.mkldnn.enabled = False
    errors = np.seterr(divide="raise")
    try:
        found = environment.compare(before, environment.switches(CPU))
    finally:
        torch.set_flush_denormal(False)
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.enabled = True
        np.seterr(**errors)
    assert [(d.key, d.recorded, d.current) for d in found] == [
        ("flush_denormal", None, True),
        ("matmul_precision", "highest", "high"),
        ("mkldnn_enabled", None, False),
        ("numpy_errors", None, "divide=raise, over=warn, under=ignore, invalid=warn"),
    ]
    assert environment.switches(CPU) == before


def test_change_through_data_attribute_is_detected_up_to_16_mib() -> None:
    weight = nn.Parameter(torch.zeros(300, 300))
    before = late_changes._mark(weight)
    weight.data.add_(1)
    assert late_changes._mark(weight) != before


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_only_what_an_evaluation_leaves_changed_counts_as_late_change(
    monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """``large``: as for tensors whose in-place changes are counted, not compared."""
    if not small:
        monkeypatch.setattr(late_changes, "SMALL", -1)
    weight = nn.Parameter(torch.rand(3))
    ddp = SimpleNamespace(broadcast_buffers=True)
    state: Any = SimpleNamespace(
        rank=0, capture=lambda: Snapshot(shared={"model/weight": weight}), require_wrapped=lambda: (ddp, None)
    )
    late, kept = late_changes.LateChanges(state, 7), weight.detach().clone()
    with late.ignoring_evaluation(), torch.no_grad():
        weight.copy_(torch.ones(3))  # averages in place of the weights
        weight.copy_(kept)
    assert late.changed_components() == []
    with late.ignoring_evaluation(), torch.no_grad():
        weight.clamp_(max=-0.5)
    assert late.changed_components() == ["model"]
