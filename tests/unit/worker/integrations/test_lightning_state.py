"""Attributes of callbacks and what hooks add to a checkpoint, as state: which changes are saved, and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ratchet_hooks.state.encode import decode, encode
from tests.support.optional_packages import skip_if_missing

pytestmark = skip_if_missing("lightning")


@pytest.mark.parametrize("now", [torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1), torch.tensor([0.0, -0.0])])
def test_attribute_of_equal_value_and_other_bits_dtype_or_shape_is_saved(now: torch.Tensor) -> None:
    from lightning.pytorch.callbacks import Callback

    from ratchet_worker.integrations.lightning_state import Attributes

    class Own(Callback):
        best: Any
        mean: Any

    callback = Own()
    callback.best, callback.mean = torch.zeros(2), torch.tensor(float("nan"))
    attributes = Attributes({}, [callback])
    callback.best = now
    state = attributes.state()
    assert [*state.values()] == [now]  # the same object
    callback.best = torch.ones(1)
    attributes.restore(state)
    assert callback.best is now


def _checkpoint(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "epoch": 1,
        "state_dict": {"weight": torch.zeros(2), "_extra_state": {"version": [1]}},
        "callbacks": {"mine": {"best": 0.5}},
        "loops": {"fit_loop": {"done": [0.0, float("nan")]}},
        "optimizer_states": [optimizer.state_dict()],
        "hyper_parameters": {"lr": 0.1, "sizes": {"hidden": [8, 8]}, "table": np.zeros(2), "backbone": object()},
    }


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an entry": lambda c: c["hyper_parameters"].update(x=1),
    "a removed entry": lambda c: c["hyper_parameters"].pop("lr"),
    "a nested entry": lambda c: c["hyper_parameters"]["sizes"]["hidden"].append(4),
    "an equal number of another type": lambda c: c["hyper_parameters"]["sizes"].update(hidden=[8.0, 8]),
    "an array": lambda c: c["hyper_parameters"]["table"].fill(1),
    "a loop": lambda c: c["loops"]["fit_loop"]["done"].pop(),
    "extra state": lambda c: c["state_dict"]["_extra_state"]["version"].append(2),
    "the sign of a zero": lambda c: c["loops"]["fit_loop"]["done"].__setitem__(0, -0.0),
    "other optimizers": lambda c: c.update(optimizer_states=[{"scale": 2}]),
    "a new dict": lambda c: c.update(hyper_parameters={"lr": 0.1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_in_place_of_on_save_checkpoint_is_saved_and_restored(change: str) -> None:
    from ratchet_worker.integrations.lightning_state import Additions

    def saved() -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        weight.sum().backward()
        optimizer.step()
        return _checkpoint(optimizer)

    checkpoint = saved()
    additions = Additions(checkpoint)
    before = additions.changes()
    assert not before["put"] and not before["gone"] and not any(map(any, before["parts"].values()))
    CHANGES[change](checkpoint)
    found = decode(*encode(additions.changes(), root=""))  # and nothing of what cannot be stored
    restored = Additions.apply(saved(), found)
    for one in (checkpoint, restored):
        one["hyper_parameters"].pop("backbone", None)
    assert encode(restored, root="")[1] == encode(checkpoint, root="")[1]
    tensors, wanted = (encode(one, root="")[0] for one in (restored, checkpoint))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())


def test_content_that_contains_itself_is_compared() -> None:
    from ratchet_worker.integrations.lightning_state import Additions

    cycle: list[Any] = [1]
    cycle.append(cycle)
    additions = Additions(checkpoint := {"state_dict": {}, "callbacks": {}, "cycle": cycle})
    assert additions.changes()["put"] == {} and additions.left_out == []
    checkpoint["cycle"][0] = 2
    assert additions.changes()["put"] == {} and additions.left_out == ["cycle"]


def test_object_that_cannot_be_stored_is_left_out_of_changes_in_place() -> None:
    from ratchet_worker.integrations.lightning_state import Additions

    checkpoint = _checkpoint(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)) | {"list": [1]}
    additions = Additions(checkpoint)
    checkpoint["hyper_parameters"].update(config=object(), lr=0.2)
    checkpoint["loops"]["fit_loop"]["owner"] = checkpoint["state_dict"]["_extra_state"]["owner"] = object()
    checkpoint["list"].append(object())
    found = additions.changes()
    assert found["put"] == {} and found["parts"] == {"hyper_parameters": [{"lr": 0.2}, []]}
    assert additions.left_out == ["list", "state_dict._extra_state", "loops.fit_loop", "hyper_parameters.config"]
    checkpoint["state_dict"]["head"] = owner = object()  # these need an answer of the script
    checkpoint["mine"] = {"owner": owner}
    found = additions.changes()
    assert found["put"] == {"mine": {"value": {"owner": owner}}}
    assert found["parts"]["state_dict"] == [{"head": owner}, []]


def test_changes_within_the_states_of_optimizers_and_schedulers_are_left_out() -> None:
    from ratchet_worker.integrations.lightning_state import Additions

    checkpoint = _checkpoint(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)) | {
        "lr_schedulers": [{"lr": 1}]
    }
    additions = Additions(checkpoint)
    checkpoint["optimizer_states"][0]["param_groups"][0]["scale"] = checkpoint["lr_schedulers"][0]["lr"] = 2
    assert additions.changes() == {"put": {}, "gone": [], "parts": {}}


@pytest.mark.parametrize(
    "values", [[0.5] * 1000, ("a.png", None, 1, 1.5, True) * 200, dict.fromkeys(map(str, range(1000)), 0)]
)
def test_many_plain_values_are_compared_at_once(values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ratchet_worker.integrations import lightning_state

    calls, flat = [0], lightning_state._flat

    def counted(*args: Any) -> list[Any]:
        calls[0] += 1
        return flat(*args)

    monkeypatch.setattr(lightning_state, "_flat", counted)
    additions = lightning_state.Additions({"state_dict": {}, "callbacks": {"mine": {"history": values}}})
    assert additions.changes()["parts"] == {} and calls[0] < 10


def test_only_a_hook_of_the_script_makes_a_checkpoint_that_is_compared() -> None:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint

    from ratchet_worker.integrations.lightning_state import has_save_hook

    class Hooked(LightningModule):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    given = Callback()
    given.on_save_checkpoint = print  # type: ignore[method-assign]
    assert not has_save_hook(LightningModule(), [Callback(), ModelCheckpoint()])
    assert has_save_hook(Hooked(), [])
    assert has_save_hook(LightningModule(), [given]) and has_save_hook(LightningModule(), [EMAWeightAveraging()])
