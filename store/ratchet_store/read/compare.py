"""Compare two checkpoints bit for bit. ``python -m ratchet_store.compare DIRECTORY DIRECTORY`` prints the result; exit status 0:
identical, 1: not, 2: an error, such as a damaged checkpoint."""

from __future__ import annotations

import argparse
import math
import struct
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import xxhash

from ratchet_contract.checkpoint.manifest import SHARED_PREFIX, Manifest
from ratchet_contract.errors import CheckpointError
from ratchet_hooks.state.safetensors_header import ITEMSIZE
from ratchet_store.read.checkpoint_reader import CheckpointReader, StoredTensor

JsonValue = Any

_CHUNK: Final = 1 << 20
_NONZERO: Final = bytes([0]) + bytes([1]) * 255
_MISSING: Final = object()
_MAX_STATE_DIFFERENCES: Final = 100
_BATCH_BYTES: Final = 64 << 20
"""Bytes of the first checkpoint's tensors that are held in memory at a time, unless one tensor is larger."""
_MAX_MEASURED: Final = 1 << 20
"""Elements of a tensor whose differences are measured: as many as Python handles in a fraction of a second."""
_FORMATS: Final = {
    "F16": "e", "F32": "f", "F64": "d", "I8": "b", "U8": "B", "I16": "h", "U16": "H", "I32": "i", "U32": "I", "I64": "q",
    "U64": "Q",
}  # fmt: skip


@dataclass(frozen=True)
class TensorComparison:
    """The result for one tensor name. ``digest_a`` and ``digest_b``: None if that checkpoint has no such tensor. ``note``: why
    elements could not be compared; None if they could.

    The following fields are only set if compared elements differ. ``first``: row-major index of the first element that
    differs. ``count``: number of elements that differ. ``values``: this first element in both checkpoints, if its dtype can be
    converted. ``largest``: the largest absolute difference that was seen, if there is one.
    """

    name: str
    equal: bool
    digest_a: str | None
    digest_b: str | None
    first: int | None = None
    count: int | None = None
    note: str | None = None
    shape: tuple[int, ...] = ()
    values: tuple[float, float] | None = None
    largest: float | None = None


@dataclass(frozen=True)
class StateDifference:
    """One place where a rank's JSON state differs. ``pointer``: its JSON pointer; ``path``: its keys; ``a`` and ``b``: the two
    values as shortened text."""

    rank: int
    pointer: str
    a: str
    b: str
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class ComponentSummary:
    """The result for one component, such as the model. ``tensors``: number of its tensors; ``identical``: number of equal ones;
    ``nbytes``: their bytes in the first checkpoint."""

    component: str
    tensors: int
    identical: int
    nbytes: int
    digest_a: str
    digest_b: str


@dataclass(frozen=True)
class Comparison:
    """The result for two checkpoints. ``identical``: all is equal apart from excluded places; ``states``: differences only, at
    most 100 per rank; ``unsaved``: paths of state that a checkpoint could not save."""

    identical: bool
    tensors: list[TensorComparison]
    states: list[StateDifference]
    components: list[ComponentSummary]
    digest_a: str
    digest_b: str
    unsaved: list[str]

    @property
    def different(self) -> list[TensorComparison]:
        """Return the tensors that are not equal, in the order of ``tensors``."""
        return [tensor for tensor in self.tensors if not tensor.equal]


def compare(a: Path, b: Path, *, exclude: Collection[str] = ()) -> Comparison:
    """Compare two committed checkpoints bit for bit. ``exclude``: shell patterns of JSON pointers into the ranks' states that may
    differ, such as ``/timing/*``. Raises ``CheckpointError`` if either checkpoint is damaged or unreadable."""
    return compare_opened(CheckpointReader(a), CheckpointReader(b), exclude=exclude)


def same_files(a: Manifest, b: Manifest) -> bool:
    """True if the two manifests record the same rank files and tensors. False does not prove that the bytes differ."""
    return [f.model_dump() for f in a.files] == [f.model_dump() for f in b.files] and a.tensors == b.tensors


def compare_opened(a: CheckpointReader, b: CheckpointReader, *, exclude: Collection[str] = ()) -> Comparison:
    """Compare two open checkpoints. The result, ``exclude`` and the errors are those of ``compare``."""
    readers = a, b
    groups: dict[str, list[str]] = {}
    for name in sorted({entry.name for reader in readers for entry in reader.manifest.tensors}):
        groups.setdefault(component_of(name), []).append(name)
    tensors: list[TensorComparison] = []
    components: list[ComponentSummary] = []
    for component, names in groups.items():
        found, nbytes = _compare_names(readers, names)
        tensors += found
        components.append(_summary(component, found, nbytes))
    states, unsaved = _compare_states(readers, exclude)
    identical = not states and all(tensor.equal for tensor in tensors)
    digest_a, digest_b = (_digest([(c.component, d) for c, d in zip(components, side, strict=True)])
                          for side in ([c.digest_a for c in components], [c.digest_b for c in components]))  # fmt: skip
    return Comparison(identical, tensors, states, components, digest_a, digest_b, sorted(unsaved))


def _unsaved(state: JsonValue) -> list[str]:
    """Return the paths that one rank's JSON state records as changed by training but not saved."""
    match state:
        case {"attributes": {"dict": [*items]}}:
            return next((value for key, value in items if key == "unsaved"), [])
    return []


def component_of(name: str) -> str:
    """Return the component of a tensor's name: ``model`` for ``shared/model/conv.weight``, ``hook`` for
    ``rank/1/hook/error/conv.weight``."""
    rest = name.removeprefix(SHARED_PREFIX) if name.startswith(SHARED_PREFIX) else name.split("/", 2)[-1]
    return rest.split("/", 1)[0]


def _compare_names(
    readers: tuple[CheckpointReader, CheckpointReader], names: list[str]
) -> tuple[list[TensorComparison], int]:
    """Compare the tensors ``names``. Returns a result per name, and the bytes of these tensors in the first checkpoint."""
    found, nbytes = [], 0
    for batch in _batches(readers[0].manifest, names):
        sides = []
        for reader in readers:
            known = {entry.name for entry in reader.manifest.tensors}
            sides.append(reader.tensors([name for name in batch if name in known]))
        nbytes += sum(len(tensor.data) for tensor in sides[0].values())
        found += [_compare_tensor(name, sides[0].get(name), sides[1].get(name)) for name in batch]
    return found, nbytes


def _batches(manifest: Manifest, names: list[str]) -> Iterator[list[str]]:
    """Yield ``names`` in lists whose tensors have at most ``_BATCH_BYTES`` bytes in ``manifest``, unless one alone is larger."""
    sizes: dict[str, int] = {}
    for entry in manifest.tensors:
        sizes[entry.name] = sizes.get(entry.name, 0) + entry.nbytes
    batch: list[str] = []
    room = _BATCH_BYTES
    for name in names:
        room -= sizes.get(name, 0)
        if batch and room < 0:
            yield batch
            batch, room = [], _BATCH_BYTES - sizes.get(name, 0)
        batch.append(name)
    if batch:
        yield batch


def _compare_tensor(name: str, a: StoredTensor | None, b: StoredTensor | None) -> TensorComparison:
    """Compare one tensor of two checkpoints; None: that checkpoint has no such tensor."""
    digest_a, digest_b = _tensor_digest(a), _tensor_digest(b)
    if a is None or b is None:
        return TensorComparison(
            name, False, digest_a, digest_b, note=f"only in {'the second' if a is None else 'the first'}"
        )
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        note = f"{a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
        return TensorComparison(name, False, digest_a, digest_b, note=note)
    if a.data == b.data:
        return TensorComparison(name, True, digest_a, digest_b)
    first, count = count_differences(a.data, b.data, ITEMSIZE[a.dtype])
    assert first is not None
    values, largest = _measure(a, b, first)
    return TensorComparison(
        name, False, digest_a, digest_b, first, count, shape=a.shape, values=values, largest=largest
    )


def _measure(a: StoredTensor, b: StoredTensor, first: int) -> tuple[tuple[float, float] | None, float | None]:
    """Return ``values`` and ``largest`` of a ``TensorComparison``; ``first`` is the index of the first element that differs."""
    x, y = (_to_numbers(tensor, first, _MAX_MEASURED) for tensor in (a, b))
    if not x or not y:
        return None, None
    gaps = [gap for gap in (abs(p - q) for p, q in zip(x, y, strict=True)) if not math.isnan(gap)]
    return (x[0], y[0]), max(gaps, default=None)


def _to_numbers(tensor: StoredTensor, first: int, max_count: int) -> tuple[float, ...]:
    """Return up to ``max_count`` elements as numbers, from element ``first`` on; empty for a dtype other than BF16 and
    those of ``_FORMATS``."""
    size = ITEMSIZE[tensor.dtype]
    raw = tensor.data[first * size : (first + max_count) * size]
    if tensor.dtype == "BF16":  # the upper half of an F32
        wide = bytearray(2 * len(raw))
        wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
        return struct.unpack(f"<{len(wide) // 4}f", wide)
    code = _FORMATS.get(tensor.dtype)
    return () if code is None else struct.unpack(f"<{len(raw) // size}{code}", raw)


def count_differences(a: bytes | bytearray, b: bytes | bytearray, itemsize: int) -> tuple[int | None, int]:
    """Return the index of the first element that differs (None: none does) and the number that differ, in two buffers of equal
    length."""
    first, count = None, 0
    for begin in range(0, len(a), _CHUNK):  # a multiple of every item size
        x, y = a[begin : begin + _CHUNK], b[begin : begin + _CHUNK]
        if x == y:
            continue
        # One big xor; bytes that differ become 1, and the lanes of an element are or-ed together: no loop over elements.
        difference = (int.from_bytes(x, "little") ^ int.from_bytes(y, "little")).to_bytes(len(x), "little")
        marks = difference.translate(_NONZERO)
        lanes = 0
        for lane in range(itemsize):
            lanes |= int.from_bytes(marks[lane::itemsize], "little")
        if first is None:
            first = (begin + marks.index(1)) // itemsize
        count += lanes.bit_count()
    return first, count


def _tensor_digest(tensor: StoredTensor | None) -> str | None:
    """Return the XXH3-128 in hex of a tensor's dtype, shape and bytes; None for None."""
    if tensor is None:
        return None
    hasher = xxhash.xxh3_128(f"{tensor.dtype}{list(tensor.shape)}".encode())
    hasher.update(tensor.data)
    return hasher.hexdigest()


def _summary(component: str, tensors: list[TensorComparison], nbytes: int) -> ComponentSummary:
    """Return the summary of a component, from the results for its tensors. ``nbytes``: bytes of these in the first checkpoint."""
    return ComponentSummary(
        component, len(tensors), sum(t.equal for t in tensors), nbytes,
        _digest([(t.name, t.digest_a) for t in tensors]), _digest([(t.name, t.digest_b) for t in tensors]),
    )  # fmt: skip


def _digest(parts: list[tuple[str, str | None]]) -> str:
    """Return the XXH3-128 in hex of a list of names with their digests."""
    hasher = xxhash.xxh3_128()
    for name, digest in parts:
        hasher.update(f"{name}\0{digest}\n".encode())
    return hasher.hexdigest()


def _compare_states(
    readers: tuple[CheckpointReader, CheckpointReader], exclude: Collection[str]
) -> tuple[list[StateDifference], set[str]]:
    """Compare the ranks' JSON states. Returns the differences, and the paths of state that either checkpoint could not save."""
    found: list[StateDifference] = []
    unsaved = set[str]()
    for rank in range(max(reader.manifest.world_size for reader in readers)):
        a, b = (r.state(rank) if rank < r.manifest.world_size else _MISSING for r in readers)
        unsaved.update(_unsaved(a), _unsaved(b))
        try:
            places: list[StateDifference] = []
            _walk(a, b, "", rank, exclude, places)
            found += [replace(p, path=_untagged_path(b if a is _MISSING else a, p.pointer)) for p in places]
        except RecursionError:
            raise CheckpointError(f"the state of rank {rank} is nested too deep: Ratchet did not write it") from None
    return found, unsaved


def _walk(
    a: JsonValue, b: JsonValue, pointer: str, rank: int, exclude: Collection[str], out: list[StateDifference]
) -> None:
    """Append the differences between ``a`` and ``b`` at ``pointer`` to ``out``, up to a limit, except places that match
    ``exclude``."""
    if len(out) >= _MAX_STATE_DIFFERENCES or any(fnmatchcase(pointer, pattern) for pattern in exclude):
        return
    if type(a) is dict and type(b) is dict:
        for key in sorted({*a, *b}):
            step = key.replace("~", "~0").replace("/", "~1")
            _walk(a.get(key, _MISSING), b.get(key, _MISSING), f"{pointer}/{step}", rank, exclude, out)
    elif type(a) is list and type(b) is list and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            _walk(x, y, f"{pointer}/{index}", rank, exclude, out)
    elif type(a) is not type(b) or repr(a) != repr(b):  # repr distinguishes -0.0 from 0.0
        out.append(StateDifference(rank, pointer, _format_value(a, pointer), _format_value(b, pointer)))


def _format_value(value: JsonValue, pointer: str) -> str:
    """Return a JSON value as short text. A float that is stored as hexadecimal text becomes a decimal number."""
    is_float = pointer.endswith("/float") and isinstance(value, str) and not value.startswith("nan:")
    return repr(float.fromhex(value)) if is_float else _short(value)


def _untagged_path(root: JsonValue, pointer: str) -> tuple[str, ...]:
    """Return the keys along a JSON pointer into ``root`` without the tags of the JSON form: ``("scheduler", "last_epoch")`` for
    ``/scheduler/dict/2/1``."""
    out: list[str] = []
    node, tokens = root, [token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:]]
    while tokens:
        token = tokens.pop(0)
        if isinstance(node, dict) and len(node) == 1 and out and token in node:  # a tag
            node = node[token]
            if token == "dict" and len(tokens) > 1 and isinstance(node, list) and int(tokens[0]) < len(node):
                key, node = node[int(tokens[0])]
                tokens = tokens[2:]
                out.append(str(key))
            continue
        out.append(token)
        if isinstance(node, list) and token.isdigit() and int(token) < len(node):
            node = node[int(token)]
        else:
            node = node.get(token) if isinstance(node, dict) else None
    return tuple(out)


def _short(value: JsonValue) -> str:
    """Return the value's ``repr``, cut to 200 characters; ``(absent)`` for ``_MISSING``."""
    text = "(absent)" if value is _MISSING else repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def render(comparison: Comparison, *, limit: int = 10) -> str:
    """Return the comparison as text: a row per component, some of the differences, and a last line with the verdict."""
    lines = [f"{'component':<12} {'tensors':>7} {'identical':>9} {'bytes':>13}  digest"]
    for c in comparison.components:
        digests = c.digest_a if c.digest_a == c.digest_b else f"{c.digest_a} != {c.digest_b}"
        lines.append(f"{c.component:<12} {c.tensors:>7} {c.identical:>9} {c.nbytes:>13}  {digests}")
    for tensor in comparison.different[:limit]:
        what = tensor.note or f"{tensor.count} elements differ, the first is {tensor.first}"
        lines.append(f"  {tensor.name}: {what}")
    for state in comparison.states[:limit]:
        lines.append(f"  state of rank {state.rank} at {state.pointer or '/'}: {state.a} != {state.b}")
    rest = max(len(comparison.different) - limit, 0) + max(len(comparison.states) - limit, 0)
    if rest:
        lines.append(f"  ... and {rest} more")
    verdict = "identical" if comparison.identical else "NOT identical"
    same = comparison.digest_a if comparison.digest_a == comparison.digest_b else (
        f"{comparison.digest_a} != {comparison.digest_b}"
    )  # fmt: skip
    lines.append(f"{verdict}: all tensors {same}, states {'equal' if not comparison.states else 'different'}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line: print the comparison of two directories. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ratchet_store.compare", description="Compare two checkpoints bit by bit."
    )
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--exclude", action="append", default=[], help="JSON pointer pattern of states that may differ")
    arguments = parser.parse_args(argv)
    try:
        comparison = compare(arguments.a, arguments.b, exclude=arguments.exclude)
    except CheckpointError as error:
        print(f"error: {error.detail}", file=sys.stderr)
        return 2
    print(render(comparison))
    return 0 if comparison.identical else 1
