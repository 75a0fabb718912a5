"""Comparison with the last save: dictionaries' contents and tensors' forms."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ratchet_worker.state.change_detection import Contents, Forms

CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "set": lambda d: d.update(a=3),
    "equal and another": lambda d: d.update(a=True),
    "come": lambda d: d.update(c=1),
    "gone": lambda d: d.pop("a"),
    "last gone": lambda d: d.popitem(),
    "cleared": lambda d: d.clear(),
    "by default": lambda d: d.setdefault("c", 1),
    "merged": lambda d: d.__ior__({"b": 5}),
    "constant tuple": lambda d: d.update(a=(1, (2, "x"))),
    "reordered": lambda d: d.update(a=d.pop("a")),
}


@pytest.mark.parametrize("make", [dict, lambda **k: defaultdict(dict, **k), lambda **k: vars(_with(k))])
@pytest.mark.parametrize("name", CHANGES)
def test_contents_detect_every_dictionary_change(name: str, make: Any) -> None:
    one, other = make(a=1, b=2), make(a=1, b=2)
    seen = Contents([one, other])
    assert seen.matches([one, other]) and not seen.matches([one])
    CHANGES[name](one)
    assert not seen.matches([one, other])
    again = Contents([one, other])
    assert again.matches([one, other])


def _with(attributes: dict[str, Any]) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        lambda: (1, float("2.5e300")),
        lambda: np.float64(2.5),
        lambda: float("2.5e300"),
        lambda: bytearray(3),
    ],
    ids=["tensor", "tuple", "numpy", "float", "bytearray"],
)
def test_contents_detect_new_value_at_reused_address(make: Callable[[], Any]) -> None:
    """``id`` alone does not tell them apart: CPython gives the next object the address of the one that was freed."""
    for _ in range(200):
        held = {"a": make()}
        seen = Contents([held])
        del held["a"]
        held["a"] = make()
        assert not seen.matches([held])


def test_contents_do_not_keep_replaced_tensors_alive() -> None:
    held: dict[str, Any] = {"a": torch.ones(3), "b": [torch.ones(3)], "c": (1, torch.ones(3))}
    alive = [weakref.ref(held["a"]), weakref.ref(held["b"][0]), weakref.ref(held["c"][1])]
    seen = Contents([held])
    held.clear()
    gc.collect()
    assert [one() for one in alive] == [None] * 3 and not seen.matches([held])


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
def test_forms_detect_every_change_of_tensor_form(name: str, grad: bool) -> None:
    tensors = _tensors()
    with torch.set_grad_enabled(grad):
        forms = Forms(tensors)
        assert forms.matches(tensors)
        tensors[1].add_(1)  # elements and memory are no part of it
        tensors[1].data = tensors[1].clone()
        assert forms.matches(tensors)
    FORMS[name](tensors)
    with torch.set_grad_enabled(grad):
        assert not forms.matches(tensors)


def test_forms_never_match_duplicate_or_sparse_tensors() -> None:
    one = torch.ones(2)
    for tensors in ([one, one], [one.to_sparse()]):
        assert not Forms(tensors).matches(tensors)
