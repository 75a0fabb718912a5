"""The codec gives back every bit, or refuses with the path of the key."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.encode import decode, encode


def through_disk(value: object) -> Any:
    """Encode, pass through safetensors bytes and through JSON with sorted keys (as canonical writers do), decode."""
    tensors, data = encode(value, root="state")
    text = json.dumps(data, sort_keys=True, allow_nan=False)
    return decode(load(save(tensors)), json.loads(text))


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, NAN_WITH_PAYLOAD]
)
def test_floats_keep_every_bit(value: float) -> None:
    assert bits(through_disk({"x": value})["x"]) == bits(value)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 2**53, 2**53 + 1, -(2**200), "", "ä\n\0", b"\x00\xff", 1 + 2j, [], (), {}, [None, [True, (1,)]],
        {1: "int", "1": "str", True + 1: "two", 1.5: "float", None: 0, (1, "a"): "tuple", False: "bool"}, {"b": 1, "a": 2},
        {3, 1, 2}, frozenset({"x", 1}), torch.Size([2, 3]), OrderedDict(b=1, a=2), np.float32(0.1), np.int64(-5), np.bool_(True),
        Counter([3, 1, 3]), defaultdict(list, {"b": [1], "a": []}), defaultdict(None, {1: 2}), deque([1, (2,)]), deque([1, 2], 2),
    ],
)  # fmt: skip
def test_plain_values_keep_type_and_order(value: object) -> None:
    back = through_disk({"x": value})["x"]
    assert back == value
    assert type(back) is type(value)
    assert getattr(back, "default_factory", None) is getattr(value, "default_factory", None)
    assert getattr(back, "maxlen", None) == getattr(value, "maxlen", None)
    if isinstance(value, dict):
        assert [(type(k), k) for k in back] == [(type(k), k) for k in value]


@pytest.mark.parametrize(
    "value", [np.str_(text) for text in ("", "a", "a\0", "\0", "\U0010ffff\ud800")]
    + [np.bytes_(text) for text in (b"", b"a", b"a\0", b"\0")],
    ids=ascii,
)  # fmt: skip
def test_numpy_strings_round_trip(value: np.str_ | np.bytes_) -> None:
    """Their JSON is that of format 2, so a checkpoint saved earlier is read as well."""
    assert encode(value, root="state") == ({}, {"scalar": [value.dtype.str, value.tobytes().hex()]})
    back = through_disk(value)
    assert type(back) is type(value) and back.dtype == value.dtype and back == value


@pytest.mark.parametrize("dtype", ["U0", "S0"])
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 3)])
def test_arrays_of_empty_strings_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    """Fields of records can have these dtypes."""
    value = np.zeros(shape, [("a", dtype), ("b", "i4")])["a"]
    back = through_disk(value)
    assert back.dtype == value.dtype == np.dtype(dtype) and back.shape == shape and np.array_equal(back, value)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=100)
@given(json_like)
def test_encoded_nested_values_round_trip(value: object) -> None:
    assert repr(through_disk([value])) == repr([value])


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 4)], ids=str)
def test_encoded_tensors_of_every_dtype_and_shape_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)  # 0 and 1 are legal bytes of a bool too
    tensor = raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    back = through_disk(tensor)
    assert back.dtype is dtype and back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_nan_payloads_in_tensors_survive() -> None:
    raw = torch.tensor([0x7FC00123, 0x7F800000, -8388608, 1], dtype=torch.int32)
    assert torch.equal(through_disk(raw.view(torch.float32)).view(torch.int32), raw)


def test_encoded_dense_tensors_keep_strides_and_sparse_views_do_not() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert through_disk(image).stride() == image.stride()
    gaps = torch.arange(12.0).reshape(3, 4)[:, ::2]
    assert torch.equal(through_disk(gaps), gaps)
    assert torch.equal(through_disk(torch.ones(1, 3).expand(4, 3)), torch.ones(4, 3))
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(through_disk(conjugate), conjugate)


def test_shared_storage_is_shared_again() -> None:
    flat = torch.arange(10.0)
    state = {"flat": flat, "view": flat[2:6].view(2, 2), "again": flat, "alone": torch.ones(2), "empty": flat[:0]}
    back = through_disk(state)
    assert all(torch.equal(back[k], state[k]) for k in state)
    back["flat"][2] = -1.0
    assert back["view"][0, 0] == -1.0 and back["again"][2] == -1.0


def test_gradients_and_parameters_come_back_as_plain_tensors() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    back = through_disk([parameter, parameter * 2])
    assert type(back[0]) is torch.Tensor and not back[0].requires_grad and back[1].grad_fn is None
    assert torch.equal(back[0], parameter.detach())


def test_encoded_module_state_dict_keeps_version_metadata() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    back = through_disk(state)
    assert type(back) is OrderedDict and back._metadata == state._metadata  # type: ignore[attr-defined]
    torch.nn.BatchNorm1d(3).load_state_dict(back)


@pytest.mark.parametrize(
    "array",
    [
        np.array(1.5),
        np.zeros((0, 2)), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(6)[::2], np.array(["ab", "c"]),
        np.array([True]), np.array([1 + 2j]), np.arange(3, dtype=">i4"), np.float16([1, 2]),
        np.array([1], dtype="datetime64[s]"),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)  # fmt: skip
def test_encoded_numpy_arrays_round_trip(array: np.ndarray[Any, Any]) -> None:
    back = through_disk({"a": array})["a"]
    assert back.dtype == array.dtype and back.tobytes() == array.tobytes() and back.shape == array.shape
    assert back.flags.f_contiguous == np.array(array).flags.f_contiguous and back.flags.writeable


def test_numpy_generators_continue_where_they_were() -> None:
    legacy = np.random.RandomState(3)
    legacy.standard_normal(5)  # odd: half of a Box-Muller pair is cached
    modern = [
        np.random.Generator(getattr(np.random, name)(7))
        for name in ("PCG64", "PCG64DXSM", "Philox", "SFC64", "MT19937")
    ]
    for generator in modern:
        generator.standard_normal(3)
        generator.spawn(2)
    back = through_disk({"legacy": legacy, "modern": modern})
    assert np.array_equal(back["legacy"].standard_normal(9), legacy.standard_normal(9))
    assert back["legacy"].randint(1_000_000_000) == legacy.randint(1_000_000_000)
    for mine, other in zip(modern, back["modern"], strict=True):
        assert np.array_equal(mine.standard_normal(9), other.standard_normal(9))
        assert mine.spawn(1)[0].integers(2**60) == other.spawn(1)[0].integers(2**60)


Point = namedtuple("Point", "x")
cycle: list[object] = []
cycle.append(cycle)
ring: list[dict[str, object]] = [{}, {}, {}]  # its paths branch: without an end for a walk that follows all of them
for number, node in enumerate(ring):
    node |= {"previous": ring[number - 1], "next": ring[(number + 1) % 3]}
deep: list[object] = []
for _ in range(150):
    deep = [deep]


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"error_dict": {3: {"foo": object()}}}, "state.error_dict[3].foo"),
        ([1, [lambda: 0]], "state[1][0]"),
        ({"a b": {"c": Path("x")}}, "state['a b'].c"),
        ({"d": defaultdict(lambda: 0)}, "state.d"),
        ({"p": Point(1)}, "state.p"),
        ({"k": {Point(1): 1}}, "state.k[Point(x=1)]"),
        ({"o": np.array([object()])}, "state.o"),
        ({"s": torch.eye(2).to_sparse()}, "state.s"),
        ({"m": torch.empty(2, device="meta")}, "state.m"),
        ({"u": "\ud800"}, "state.u"),
        ({"c": cycle}, "state.c[0]"),
        ({"ring": ring}, "state.ring[0].previous.previous.previous"),
    ],
)
def test_unsupported_value_is_refused_with_key_path(value: object, key: str) -> None:
    with pytest.raises(HookStateError) as caught:
        encode(value, root="state")
    assert caught.value.key == key


def test_too_deeply_nested_state_is_refused() -> None:
    with pytest.raises(HookStateError, match="nested deeper"):
        encode(deep, root="state")


GOOD_TENSORS, GOOD = encode({"t": torch.arange(4.0), "r": np.random.RandomState(0), "a": np.arange(3)}, root="state")


@pytest.mark.parametrize(
    "data",
    [
        {"unknown": 1}, {}, {"dict": 3}, {"dict": [[1]]}, {"float": "0xzz"}, {"int": 5}, {"tensor": {"name": "nothing"}},
        {"tensor": 1},
        {"dict": [["a", 1], ["a", 2]]}, {"RandomState": {"dict": []}}, {"array": {"name": "t", "dtype": "O", "shape": [4]}}, 1.5,
        {"tensor": {"storage": "t", "dtype": "float32", "offset": 3, "shape": [4], "stride": [1], "bits": [False, False]}},
        {"tensor": {"name": "t", "stride": [1, 2]}}, {"scalar": ["<f8", "00"]}, {"scalar": ["<U2", "61000000"]},
        {"nan": []}, {"dict": [[[], 1]]}, {"float": 3}, {"float": "0x1p99999"}, {"complex": [1, 2]}, {"deque": [10**30, []]},
        {"scalar": ["00000040", "00"]}, {"list": 1}, {"defaultdict": ["list", 1]},
        {"RandomState": {"dict": [["bit_generator", "MT19937"], ["state", {"dict": [["key", 10**30], ["pos", 10**30]]}]]}},
    ],
    ids=str,
)  # fmt: skip
def test_decode_of_malformed_data_is_refused(data: Any) -> None:
    with pytest.raises(HookStateError):
        decode(GOOD_TENSORS, data)


def test_decode_with_missing_or_extra_tensors_is_refused() -> None:
    assert set(decode(GOOD_TENSORS, GOOD)) == {"t", "r", "a"}  # type: ignore[arg-type]
    with pytest.raises(HookStateError, match="missing"):
        decode({k: v for k, v in GOOD_TENSORS.items() if k != "t"}, GOOD)
    with pytest.raises(HookStateError) as caught:
        decode({**GOOD_TENSORS, "extra": torch.ones(1)}, GOOD)
    assert caught.value.key == "extra"
