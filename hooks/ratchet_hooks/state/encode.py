"""State as tensors plus JSON, bit for bit and without pickle: ``encode`` splits a tree of plain Python values, tensors and numpy
objects; ``decode`` restores it.

In the JSON, null, booleans, small integers, strings and lists represent themselves. Everything else is an object with one key,
its tag, such as ``{"float": "0x1.8p+1"}`` or ``{"tensor": {...}}``. Views of one storage are restored as such; autograd history
is lost.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ratchet_hooks.checked_dataclass import JsonValue
from ratchet_hooks.errors import HookStateError
from ratchet_hooks.state.decode import BIT_GENERATORS, FACTORIES, decode
from ratchet_hooks.torch_compat import storage_id

__all__ = ["Encoded", "Tensors", "decode", "encode", "is_dense"]

Tensors = dict[str, torch.Tensor]

_MAX_DEPTH = 100
_SAFE_INT = 2**53  # beyond it, readers that store JSON numbers as doubles would lose digits
_NO_TENSORS = frozenset({type(None), bool, int, float, complex, str, bytes})
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Encoded:
    """A value without tensors whose JSON form, ``data``, exists already; ``encode`` puts it into its result unchanged."""

    data: JsonValue


def encode(value: object, *, root: str) -> tuple[Tensors, JsonValue]:
    """Split ``value`` into named tensors, which may share its memory, and JSON. ``root``: beginning of the path in error
    messages. Raises ``HookStateError`` for a value that cannot be stored."""
    return _Encoder(root).run(value)


def _float_text(value: float) -> str:
    """Return hexadecimal text with all 64 bits of a float; for a NaN with its sign and payload."""
    return "nan:" + struct.pack(">d", value).hex() if math.isnan(value) else value.hex()


def _is_json(value: object) -> bool:
    """True if the value is None, a boolean, a small integer or an ASCII string, which are their own JSON form."""
    kind = type(value)
    if kind is int:
        return -_SAFE_INT <= value <= _SAFE_INT  # type: ignore[operator]
    return value is None or kind is bool or (kind is str and value.isascii())  # type: ignore[attr-defined]


class _Encoder:
    """One call of ``encode``. ``active_ids``: containers that are being encoded, to detect cycles; ``storage_counts``: number of
    tensors per memory."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.tensors: Tensors = {}
        self.active_ids: set[int] = set()
        self.storage_counts: Counter[int] = Counter()
        self.names: dict[tuple[str, int], str] = {}

    def run(self, value: object) -> tuple[Tensors, JsonValue]:
        """Return the named tensors, and the JSON of ``value``."""
        self._count_sharers(value, 0)
        return self.tensors, self.value(value, ())

    def _count_sharers(self, value: object, depth: int) -> None:
        """Count the tensors in ``value`` by the memory that they use, in ``storage_counts``; those without elements are left
        out."""
        if depth > _MAX_DEPTH or id(value) in self.active_ids:
            return  # the encoding pass reports it with its path
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and value.numel():
                self.storage_counts[storage_id(value)] += 1
        elif isinstance(value, (dict, list, tuple, deque)):
            self.active_ids.add(id(value))
            for item in value.values() if isinstance(value, dict) else value:
                if type(item) not in _NO_TENSORS:
                    self._count_sharers(item, depth + 1)
            self.active_ids.discard(id(value))

    def fail(self, path: tuple[str, ...], detail: str) -> HookStateError:
        """Return the error to raise for the value at ``path``."""
        return HookStateError(self.root + "".join(path), detail)

    def value(self, value: object, path: tuple[str, ...]) -> JsonValue:
        """Return the JSON of the value at ``path``; its tensors are added to ``tensors``. Raises ``HookStateError``."""
        if _is_json(value):
            return value  # type: ignore[return-value]
        if type(value) is int:
            return {"int": str(hex(value))}
        if type(value) is str:
            return self._text(value, path)
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        if type(value) is Encoded:
            return value.data
        leaf = self._scalar(value)
        if leaf is not None:
            return leaf
        if isinstance(value, (np.ndarray, np.generic, np.random.RandomState, np.random.Generator)):
            return self._numpy(value, path)
        return self._nested(value, path)

    def _text(self, value: str, path: tuple[str, ...]) -> str:
        """Return the string unchanged. Raises ``HookStateError`` if it has lone surrogates."""
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise self.fail(path, "a string with lone surrogates cannot be stored as JSON") from exc
        return value

    @staticmethod
    def _scalar(value: object) -> JsonValue:
        """Return the JSON of a float, complex number or bytes; None for any other value."""
        if type(value) is float:
            return {"float": _float_text(value)}
        if type(value) is complex:
            return {"complex": [_float_text(value.real), _float_text(value.imag)]}
        if type(value) is bytes:
            return {"bytes": value.hex()}
        return None

    def _nested(self, value: object, path: tuple[str, ...]) -> JsonValue:
        """Return the JSON of a container. Raises ``HookStateError`` for one that contains itself or cannot be stored."""
        if id(value) in self.active_ids:
            raise self.fail(path, "contains itself; a state must be a tree")
        if len(path) >= _MAX_DEPTH:
            raise self.fail(path, f"nested deeper than {_MAX_DEPTH} levels")
        self.active_ids.add(id(value))
        try:
            return self._container(value, path)
        finally:
            self.active_ids.discard(id(value))

    def _container(self, value: object, path: tuple[str, ...]) -> JsonValue:
        """Return the JSON of a container of a known type. Raises ``HookStateError`` for any other value."""
        if type(value) is dict:
            return {"dict": self._pairs(value, path)}
        if type(value) is OrderedDict:
            attributes = dict(vars(value))  # Module.state_dict() attaches its versions here
            return {"odict": [self._pairs(value, path), self._pairs(attributes, (*path, ".__dict__"))]}
        if type(value) is Counter:
            return {"counter": self._pairs(value, path)}
        if type(value) is defaultdict and (
            value.default_factory is None or value.default_factory in FACTORIES.values()
        ):
            factory = None if value.default_factory is None else value.default_factory.__name__
            return {"defaultdict": [factory, self._pairs(value, path)]}
        if type(value) is list:
            return self._items(value, path)
        if type(value) is torch.Size:
            return {"size": [int(n) for n in value]}
        if type(value) is tuple:
            return {"tuple": self._items(value, path)}
        if type(value) is deque:
            return {"deque": [value.maxlen, self._items(value, path)]}
        if type(value) in (set, frozenset):
            assert isinstance(value, (set, frozenset))
            items = [self._key(item, (*path, f"{{{item!r}}}")) for item in value]
            return {type(value).__name__: sorted(items, key=repr)}
        kind = type(value)
        raise self.fail(
            path,
            f"a {kind.__module__}.{kind.__qualname__} cannot be stored; offer tensors, numbers, strings, lists or dicts "
            "from __getstate__ or state_dict",
        )

    def _items(self, value: Iterable[object], path: tuple[str, ...]) -> list[JsonValue]:
        """Return the JSON of each item, in order."""
        return [item if _is_json(item) else self.value(item, (*path, f"[{i}]")) for i, item in enumerate(value)]  # type: ignore[misc]

    def _pairs(self, value: Mapping[Any, object], path: tuple[str, ...]) -> JsonValue:
        """Return ``[key, value]`` in JSON for each item of a mapping, in its order."""
        pairs: list[JsonValue] = []
        for key, item in value.items():
            if _is_json(key) and _is_json(item):
                pairs.append([key, item])  # type: ignore[list-item]
                continue
            plain = type(key) is str and key.isidentifier()
            inner = (*path, f".{key}" if plain else f"[{key!r}]")
            pairs.append([self._key(key, inner), self.value(item, inner)])
        return pairs

    def _key(self, key: object, path: tuple[str, ...]) -> JsonValue:
        """Return the JSON of a dictionary key or an element of a set. Raises ``HookStateError`` for an unsupported type."""
        if key is None or type(key) in (bool, int, float, str, bytes):
            return self.value(key, path)
        if type(key) is tuple:
            return {"tuple": [self._key(part, path) for part in key]}
        raise self.fail(path, f"a {type(key).__qualname__} cannot be a stored key; use str, int, bool, float or tuples")

    def _name(self, path: tuple[str, ...]) -> str:
        """Return an unused name for a tensor: its path, with a number appended if that is taken."""
        name = base = "".join(path).removeprefix(".") or "value"
        count = 1
        while name in self.tensors:
            count += 1
            name = f"{base}#{count}"
        return name

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> JsonValue:
        """Add a tensor to ``tensors`` and return its JSON. Raises ``HookStateError``, for example for a sparse one."""
        if type(tensor) not in _TENSOR_TYPES:
            raise self.fail(
                path, f"a tensor of type {type(tensor).__qualname__} cannot be stored; pass its local tensor"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise self.fail(path, f"a {tensor.layout} tensor on {tensor.device} cannot be stored; make it dense first")
        tensor = tensor.detach()
        if tensor.numel() and self.storage_counts[storage_id(tensor)] > 1:
            return self._view(tensor, path)
        plain = tensor.resolve_conj().resolve_neg()
        out: dict[str, JsonValue] = {"name": self._name(path)}
        if plain.dtype.is_complex:
            out["dtype"] = str(plain.dtype).removeprefix("torch.")
        if not plain.is_contiguous() and is_dense(plain):
            out["stride"] = list(plain.stride())
        if not plain.is_cpu:
            out["accelerator"] = True
        plain = plain.contiguous()
        self.tensors[str(out["name"])] = torch.view_as_real(plain) if plain.dtype.is_complex else plain
        return out

    def _view(self, tensor: torch.Tensor, path: tuple[str, ...]) -> JsonValue:
        """Return the JSON of a tensor that shares its memory with another one; the memory is added to ``tensors`` once."""
        key = (str(tensor.device), storage_id(tensor))
        if key not in self.names:
            name = self._name(path)
            storage = tensor.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.tensors[name] = raw
            self.names[key] = name
        return {
            **({} if tensor.is_cpu else {"accelerator": True}),
            "storage": self.names[key],
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "offset": int(tensor.storage_offset()),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "bits": [tensor.is_conj(), tensor.is_neg()],
        }

    def _numpy(self, value: object, path: tuple[str, ...]) -> JsonValue:
        """Return the JSON of a numpy array, scalar or generator. Raises ``HookStateError``, for example for an array of
        objects."""
        if isinstance(value, np.random.RandomState):
            state = value.get_state(legacy=False)
            assert isinstance(state, dict)
            return {"RandomState": self._bit_generator(state, path)}
        if isinstance(value, np.random.Generator):
            return {"Generator": self._generator(value, path)}
        assert isinstance(value, (np.ndarray, np.generic))
        if value.dtype.kind not in "biufcSUmM" or type(value) is np.memmap:
            raise self.fail(path, f"numpy data of dtype {value.dtype} cannot be stored; use numbers or fixed strings")
        if isinstance(value, np.generic):
            return {"scalar": [value.dtype.str, value.tobytes().hex()]}
        if type(value) is not np.ndarray:
            raise self.fail(path, f"a numpy {type(value).__qualname__} cannot be stored; use a plain array")
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        name = self._name(path)
        raw = value.tobytes("F" if order == "F" else "C")
        self.tensors[name] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else _NO_BYTES.clone()
        shape: list[JsonValue] = [int(n) for n in value.shape]
        return {"array": {"name": name, "dtype": value.dtype.str, "shape": shape, "order": order}}

    def _generator(self, value: np.random.Generator, path: tuple[str, ...]) -> JsonValue:
        """Return the JSON of a ``Generator``: the state of its bit generator and of its seed sequence."""
        state = self._bit_generator(value.bit_generator.state, path)
        seeds = getattr(value.bit_generator, "seed_seq", None)
        if type(seeds) is not np.random.SeedSequence:
            raise self.fail(path, "a Generator whose seed sequence is not a numpy SeedSequence cannot be stored")
        return [state, self.value(dict(seeds.state), (*path, ".seed_seq"))]

    def _bit_generator(self, state: Mapping[str, Any], path: tuple[str, ...]) -> JsonValue:
        """Return the JSON of a bit generator's state. Raises ``HookStateError`` if it is none of numpy's."""
        if state["bit_generator"] not in BIT_GENERATORS:
            raise self.fail(path, f"bit generator {state['bit_generator']} cannot be stored; use one of numpy's own")
        return self.value(dict(state), path)


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the tensor's memory contains every element exactly once and without gaps, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
