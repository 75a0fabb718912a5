"""What tells a save that nothing changed: Python's number of a dictionary's contents, and torch's own look at many tensors."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ratchet_worker.same import Forms, Versions

CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "set": lambda d: d.update(a=3),
    "equal and another": lambda d: d.update(a=True),
    "come": lambda d: d.update(c=1),
    "gone": lambda d: d.pop("a"),
    "last gone": lambda d: d.popitem(),
    "cleared": lambda d: d.clear(),
    "by default": lambda d: d.setdefault("c", 1),
    "merged": lambda d: d.__ior__({"b": 5}),
    "reordered": lambda d: d.update(a=d.pop("a")),
}


@pytest.mark.parametrize("make", [dict, lambda **k: defaultdict(dict, **k), lambda **k: vars(_with(k))])
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_a_dictionary_is_seen(name: str, make: Any) -> None:
    one, other = make(a=1, b=2), make(a=1, b=2)
    seen = Versions([one, other])
    assert seen.hold([one, other]) and not seen.hold([other, one]) and not seen.hold([one])
    CHANGES[name](one)
    assert not seen.hold([one, other])
    again = Versions([one, other])
    assert again.hold([one, other])


def _with(attributes: dict[str, Any]) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_another_dictionary_is_not_taken_for_one_that_is_gone() -> None:
    """Wherever it lies: the numbers are not given twice."""
    seen = Versions([{"a": 1}])
    gc.collect()
    assert not any(seen.hold([{"a": 1}]) for _ in range(1000))


def test_what_is_put_back_is_a_change_too() -> None:
    module = nn.Linear(2, 2)
    seen, weight = Versions([module._parameters]), module.weight
    del module.weight
    module.weight = weight
    assert not seen.hold([module._parameters])


def _tensors() -> list[torch.Tensor]:
    return [nn.Parameter(torch.ones(3, 4)), torch.ones(4, 4), torch.ones((), dtype=torch.int64), torch.ones(2, 2) * 1j]


FORMS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "dtype": lambda t: setattr(t[1], "data", t[1].data.double()),
    "dtype of as many bytes": lambda t: t.__setitem__(1, t[1].view(torch.int32)),
    "shape": lambda t: t[1].resize_(2, 8),
    "shape under the same strides": lambda t: setattr(t[1], "data", torch.ones(3, 4)),
    "strides": lambda t: t[1].t_(),
    "dimensions": lambda t: t[2].resize_(1),
    "frozen": lambda t: t[0].requires_grad_(False),
    "trained": lambda t: t[1].requires_grad_(),
    "type": lambda t: t.__setitem__(1, nn.Parameter(t[1], requires_grad=False)),
    "conjugated": lambda t: t.__setitem__(3, t[3].conj()),
    "negated": lambda t: t.__setitem__(3, torch._neg_view(t[3])),
    "order": lambda t: t.reverse(),
    "fewer": lambda t: t.pop(),
    "more": lambda t: t.append(torch.ones(1)),
    "inference": lambda t: t.__setitem__(1, _inferred()),
}


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4, 4)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", FORMS)
def test_every_change_of_a_form_is_seen(name: str, grad: bool) -> None:
    tensors = _tensors()
    with torch.set_grad_enabled(grad):
        forms = Forms(tensors)
        assert forms.hold(tensors)
        tensors[1].add_(1)  # elements and memory are no part of it
        tensors[1].data = tensors[1].clone()
        assert forms.hold(tensors)
    FORMS[name](tensors)
    with torch.set_grad_enabled(grad):
        assert not forms.hold(tensors)


def test_where_a_tensor_stands_twice_or_is_not_dense_nothing_is_taken_for_the_same() -> None:
    one = torch.ones(2)
    for tensors in ([one, one], [one.to_sparse()]):
        assert not Forms(tensors).hold(tensors)
