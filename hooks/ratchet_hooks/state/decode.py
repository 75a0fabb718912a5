"""The reading half of ``ratchet_hooks.state.encode``: tensors and JSON back to values."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.torch_compat import negative_view

BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
FACTORIES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)}
"""Factories of a ``defaultdict``, by name."""
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def decode(tensors: Mapping[str, torch.Tensor], data: JsonValue, *, device: torch.device | None = None) -> object:
    """Return the value that ``encode`` split into ``tensors`` and ``data``. ``device``: for tensors that were on an accelerator;
    others are on the CPU. Raises ``HookStateError``."""
    decoder = _Decoder(tensors, device)
    value = decoder.value(data, "data")
    left = sorted(set(tensors) - decoder.used)
    if left:
        raise HookStateError(left[0], "a tensor that the JSON part does not mention")
    return value


def _parse_float(text: str) -> float:
    """Return the float of the text that ``_float_text`` made."""
    if text.startswith("nan:"):
        return float(struct.unpack(">d", bytes.fromhex(text[4:]))[0])
    return float.fromhex(text)


def _numpy_scalar(dtype: np.dtype[Any], raw: bytes) -> object:
    """Return the numpy scalar with the bytes ``raw``. Raises ``ValueError``."""
    # strings are made of their characters: numpy reads no empty one from memory, and none with its last NULs
    if dtype.kind not in "SU":
        return np.frombuffer(raw, dtype)[0]
    if len(raw) < dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are no {dtype}")
    text = raw[: dtype.itemsize]  # numpy pads an empty string
    if dtype.kind == "S":
        return np.bytes_(text)
    return np.str_(text.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass"))


class _Decoder:
    """One call of ``decode``. ``used``: the tensors that the JSON has mentioned; ``shared``: memories that several tensors
    share."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device | None) -> None:
        self.tensors = tensors
        self.device = device
        self.used: set[str] = set()
        self.shared: dict[str, torch.Tensor] = {}
        self.tags: dict[str, Callable[[Any, str], object]] = {
            "int": lambda v, _: int(_check_type(v, str), 16),
            "float": lambda v, _: _parse_float(v),
            "complex": lambda v, _: complex(_parse_float(v[0]), _parse_float(v[1])),
            "bytes": lambda v, _: bytes.fromhex(v),
            "tuple": lambda v, at: tuple(self._items(v, at)),
            "set": lambda v, at: set(self._items(v, at)),
            "frozenset": lambda v, at: frozenset(self._items(v, at)),
            "size": lambda v, at: torch.Size(self._items(v, at)),  # type: ignore[arg-type]
            "dict": lambda v, at: dict(self._pairs(v, at)),
            "odict": self._odict,
            "counter": lambda v, at: Counter(dict(self._pairs(v, at))),
            "defaultdict": lambda v, at: defaultdict(None if v[0] is None else FACTORIES[v[0]], self._pairs(v[1], at)),
            "deque": lambda v, at: deque(self._items(v[1], at), v[0]),
            "tensor": self._tensor,
            "array": self._array,
            "scalar": lambda v, _: _numpy_scalar(np.dtype(v[0]), bytes.fromhex(v[1])),
            "RandomState": self._random_state,
            "Generator": self._generator,
        }

    def value(self, data: JsonValue, path: str) -> object:
        """Return the value of one JSON form. ``path``: where it is, for errors. Raises ``HookStateError`` if it is malformed."""
        if data is None or isinstance(data, (bool, int, str)):
            return data
        if isinstance(data, list):
            return self._items(data, path)
        if not isinstance(data, dict) or len(data) != 1:
            raise HookStateError(path, "malformed state: expected an object with one tag")
        ((tag, payload),) = data.items()
        if tag not in self.tags:
            raise HookStateError(path, f"malformed state: unknown tag {tag!r}")
        try:
            return self.tags[tag](payload, f"{path}.{tag}")
        except (HookStateError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # of memory and device: a fault of the machine, not of the data
        except Exception as exc:
            raise HookStateError(f"{path}.{tag}", f"malformed state: {exc}") from exc

    def _items(self, data: JsonValue, path: str) -> list[object]:
        """Return the values of a list's items."""
        return [self.value(item, f"{path}[{i}]") for i, item in enumerate(_check_type(data, list))]

    def _pairs(self, data: JsonValue, path: str) -> list[tuple[Any, object]]:
        """Return the ``(key, value)`` pairs of a mapping, in its order. Raises ``HookStateError`` if a key occurs twice."""
        pairs = []
        for i, pair in enumerate(_check_type(data, list)):
            key, item = _check_type(pair, list)
            pairs.append((self.value(key, f"{path}[{i}]"), self.value(item, f"{path}[{key!r}]")))
        if len({key for key, _ in pairs}) != len(pairs):
            raise HookStateError(path, "malformed state: a key appears twice")
        return pairs

    def _odict(self, data: Any, path: str) -> object:
        """Return an OrderedDict with its attributes."""
        pairs, attributes = _check_type(data, list)
        out: OrderedDict[Any, object] = OrderedDict(self._pairs(pairs, path))
        vars(out).update(self._pairs(attributes, path))
        return out

    def _get_tensor(self, name: object, path: str) -> torch.Tensor:
        """Return the named tensor on the CPU and mark it as used. Raises ``HookStateError`` if it is missing."""
        if not isinstance(name, str) or name not in self.tensors:
            raise HookStateError(path, f"tensor {name!r} is missing")
        self.used.add(name)
        return self.tensors[name].detach().cpu()

    def _tensor(self, data: Any, path: str) -> torch.Tensor:
        """Return a tensor with the recorded strides, in memory of its own or in memory that it shares."""
        if "storage" in data:
            return self._view(data, path)
        tensor = self._get_tensor(data["name"], path)
        if "dtype" in data:
            tensor = torch.view_as_complex(tensor.contiguous())
            if tensor.dtype is not _DTYPES[data["dtype"]]:
                raise HookStateError(path, f"expected {data['dtype']}, found {tensor.dtype}")
        stride, place = data.get("stride", tensor.stride()), self._device_for(data)
        out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=place)
        return out.copy_(tensor)

    def _device_for(self, data: Mapping[str, Any]) -> torch.device:
        """Return the device on which a tensor is restored. A tensor that was on an accelerator goes to the ``device`` of
        ``decode``, if that is set. In all other cases the device is the CPU."""
        return self.device if self.device is not None and data.get("accelerator") is True else torch.device("cpu")

    def _view(self, data: Any, path: str) -> torch.Tensor:
        """Return a view of memory that several tensors share. Raises ``HookStateError`` if the view does not fit into it."""
        name = data["storage"]
        raw = self._get_tensor(name, path)
        if name not in self.shared:
            self.shared[name] = raw.clone().to(self._device_for(data))
        dtype, shape, stride = _DTYPES[data["dtype"]], data["shape"], data["stride"]
        need = data["offset"] + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        if data["offset"] < 0 or min(stride, default=0) < 0 or need * dtype.itemsize > raw.numel():
            raise HookStateError(path, f"the view does not fit into storage {name!r}")
        out = torch.empty(0, dtype=dtype, device=self._device_for(data)).set_(
            self.shared[name].untyped_storage(), data["offset"], shape, stride
        )
        conj, neg = data["bits"]
        out = out.conj() if conj else out
        return negative_view(out) if neg else out

    def _array(self, data: Any, path: str) -> object:
        """Return a numpy array in memory of its own."""
        raw = self._get_tensor(data["name"], path)
        dtype = np.dtype(data["dtype"])
        if dtype.hasobject or raw.dtype is not torch.uint8:
            raise HookStateError(path, "malformed state: not an array of bytes")
        if not dtype.itemsize:  # empty strings; other functions of numpy make this dtype one character wide
            return np.ndarray(data["shape"], dtype, order=data["order"])
        flat = np.frombuffer(raw.numpy().tobytes(), dtype=dtype) if raw.numel() else np.empty(0, dtype)
        return np.array(flat.reshape(data["shape"], order=data["order"]), order=data["order"], copy=True)

    def _bit_generator(self, data: JsonValue, path: str, *seed: Any) -> tuple[np.random.BitGenerator, Any]:
        """Return a new bit generator of the recorded class, and the recorded state, which is not set yet."""
        state: Any = self.value(data, path)
        if not isinstance(state, dict) or state.get("bit_generator") not in BIT_GENERATORS:
            raise HookStateError(path, "malformed state: not a numpy bit generator")
        return getattr(np.random, state["bit_generator"])(*seed), state

    def _random_state(self, data: JsonValue, path: str) -> np.random.RandomState:
        """Return a numpy ``RandomState`` with the recorded state."""
        bits, state = self._bit_generator(data, path)
        out = np.random.RandomState(bits)
        out.set_state(state)
        return out

    def _generator(self, data: Any, path: str) -> np.random.Generator:
        """Return a numpy ``Generator`` with the recorded state and seed sequence."""
        bit_state, seed_state = _check_type(data, list)
        seeds: Any = self.value(seed_state, f"{path}.seed_seq")
        bits, state = self._bit_generator(bit_state, path, np.random.SeedSequence(**seeds))
        bits.state = state
        return np.random.Generator(bits)


def _check_type(value: Any, kind: type) -> Any:
    """Return ``value``. Raises ``TypeError`` unless it is a ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value
