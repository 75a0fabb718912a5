"""The comparison says "identical" only when every bit is, and else where the first difference is."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet_contract.paths import checkpoint_dir_name
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.compare import compare, component_of, count_differences, render, same_files
from ratchet_store.read.difference import advice, differences
from tests.support.checkpoints import make_checkpoint, manifest_of
from tests.support.one_shot_writers import Given, commit, write_rank_file


def floats(*values: float) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


def save(root: Path, tensors: dict[str, bytes], state: Any = None, shape: tuple[int, ...] | None = None) -> Path:
    """One rank's checkpoint of F32 tensors."""
    directory = root / checkpoint_dir_name(5, 1)
    pieces = [Given(name, "F32", shape or (len(data) // 4,), 0, data) for name, data in tensors.items()]
    file, entries = write_rank_file(directory, 0, 1, pieces, state)
    commit(directory, manifest_of(5, 1, [file], entries))
    return directory


def test_compare_ignores_sharding_of_shared_tensors_over_ranks(tmp_path: Path) -> None:
    a = tmp_path / "a" / make_checkpoint(tmp_path / "a", 7, seed=1, world_size=2, state={"x": 1}).id
    b = tmp_path / "b" / make_checkpoint(tmp_path / "b", 7, seed=1, world_size=2, state={"x": 1}).id
    c = tmp_path / "c" / make_checkpoint(tmp_path / "c", 7, seed=1, world_size=3, state={"x": 1}).id
    same = compare(a, b)
    assert same.identical and same.digest_a == same.digest_b and "identical: all tensors" in render(same)
    assert [(c.component, c.tensors, c.identical) for c in same.components] == [
        ("rng", 2, 2),
        ("model", 3, 3),
        ("optimizer", 1, 1),
    ]
    other = compare(a, c)
    assert not other.identical
    assert [(t.name, t.note) for t in other.different] == [("rank/2/rng/torch", "only in the second")]
    assert [(s.rank, s.a) for s in other.states] == [(2, "(absent)")]


def test_compare_reports_first_differing_element_and_count(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"shared/model/w": floats(1, 2, 3, 4), "rank/0/hook/p": floats(1)})
    b = save(tmp_path / "b", {"shared/model/w": floats(1, 2.5, 3, -4), "rank/0/hook/p": floats(1)})
    result = compare(a, b)
    assert [(t.name, t.first, t.count) for t in result.different] == [("shared/model/w", 1, 2)]
    assert {c.component: (c.identical, c.digest_a == c.digest_b) for c in result.components} == {
        "hook": (1, True),
        "model": (0, False),
    }
    assert "shared/model/w: 2 elements differ, the first is 1" in render(result) and "NOT identical" in render(result)


def test_compare_uses_bits_not_values(tmp_path: Path) -> None:
    nan = struct.pack("I", 0x7FC00001)
    a = save(tmp_path / "a", {"shared/model/w": floats(0.0) + nan})
    b = save(tmp_path / "b", {"shared/model/w": floats(-0.0) + nan})
    assert compare(a, a).identical
    assert [(t.first, t.count) for t in compare(a, b).different] == [(0, 1)]


def test_equal_bytes_of_another_shape_are_not_identical(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"shared/model/w": floats(1, 2, 3, 4)}, shape=(2, 2))
    b = save(tmp_path / "b", {"shared/model/w": floats(1, 2, 3, 4)}, shape=(4, 1))
    result = compare(a, b)
    assert result.different[0].note == "F32[2, 2] against F32[4, 1]" and result.digest_a != result.digest_b


@pytest.mark.parametrize(
    ("a", "b", "pointer"),
    [
        ({"rng": [1, 2]}, {"rng": [1, 3]}, "/rng/1"), ({"rng": [1]}, {"rng": [1, 2]}, "/rng"), ({"a": 1}, {"a": 1.0}, "/a"),
        ({"a": True}, {"a": 1}, "/a"), ({"a": 0.0}, {"a": -0.0}, "/a"), ({"x/y": 1}, {}, "/x~1y"), ({}, {"t": {"s": 1}}, "/t"),
        ([], {}, ""),
    ],
)  # fmt: skip
def test_compare_reports_json_pointer_of_differing_state(tmp_path: Path, a: Any, b: Any, pointer: str) -> None:
    first, second = save(tmp_path / "a", {}, a), save(tmp_path / "b", {}, b)
    assert [(s.rank, s.pointer) for s in compare(first, second).states] == [(0, pointer)]
    assert compare(first, second, exclude=[pointer]).identical
    assert compare(first, first).identical


def test_compare_exclude_pattern_hides_only_matching_pointers(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {}, {"timing": {"seconds": 1.0}, "step": 5})
    b = save(tmp_path / "b", {}, {"timing": {"seconds": 2.0}, "step": 6})
    assert [s.pointer for s in compare(a, b, exclude=["/timing/*"]).states] == ["/step"]


def test_compare_command_exit_status_reflects_result(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", {"shared/model/w": floats(1)}), save(tmp_path / "b", {"shared/model/w": floats(2)})

    def run(*directories: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ratchet_store.compare", *map(str, directories)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert run(a, a).returncode == 0
    assert (run(a, b).returncode, "NOT identical" in run(a, b).stdout) == (1, True)
    missing = run(a, tmp_path)
    assert missing.returncode == 2 and "no committed checkpoint" in missing.stderr


@given(st.data(), st.sampled_from([1, 2, 4, 8]))
def test_counting_agrees_with_a_loop_over_elements(data: st.DataObject, itemsize: int) -> None:
    a = data.draw(st.binary(max_size=64).map(lambda raw: raw[: len(raw) // itemsize * itemsize]))
    b = bytearray(a)
    for index in data.draw(st.lists(st.integers(0, len(a) - 1), max_size=5) if a else st.just([])):
        b[index] ^= data.draw(st.integers(0, 255))
    elements = [
        i
        for i in range(len(a) // itemsize)
        if a[i * itemsize : (i + 1) * itemsize] != b[i * itemsize : (i + 1) * itemsize]
    ]
    assert count_differences(a, b, itemsize) == (elements[0] if elements else None, len(elements))


def test_count_differences_counts_across_chunks() -> None:
    a = bytes(5 << 20)
    b = bytearray(a)
    for position in (1 << 20, (1 << 20) + 3, (3 << 20) - 1, (5 << 20) - 1):
        b[position] = 1
    assert count_differences(a, bytes(b), 4) == (1 << 18, 3)


def test_component_of_returns_first_part_of_tensor_name(tmp_path: Path) -> None:
    assert [component_of(n) for n in ("shared/model/a.b", "rank/12/hook/error/x", "rank/0/rng")] == [
        "model",
        "hook",
        "rng",
    ]


def test_differences_are_described_with_causes_first(tmp_path: Path) -> None:
    def stored(side: str, weights: bytes, momentum: float, position: int) -> Path:
        name = "shared/optimizer/net.weight/momentum_buffer"
        tensors = {"shared/model/net.weight": weights, name: floats(momentum), "rank/0/rng/torch": floats(7)}
        groups = {"dict": [["param_groups", [{"dict": [["lr", {"float": (momentum / 8).hex()}]]}]]]}
        state = {"data": {"dict": [["epoch", 0], ["position", position]]}, "optimizer": groups}
        return save(tmp_path / side, tensors, state)

    a, b = stored("a", floats(1, 2, 3, 4), 1, 64), stored("b", floats(1, 2.5, 3, 8), 2, 96)
    found = differences(compare(a, b))
    assert [(d.component, d.place, d.detail) for d in found] == [
        ("data", "data, position (rank 0)", "64 against 96"),
        ("optimizer", "optimizer, param_groups.0.lr (rank 0)", "0.125 against 0.25"),
        (
            "optimizer",
            "optimizer, momentum_buffer of net.weight",
            "1 of 1 elements differ, the first at [0]: 1 against 2; largest difference seen 1",
        ),
        (
            "model",
            "parameter net.weight",
            "2 of 4 elements differ, the first at [1]: 2 against 2.5; largest difference seen 4",
        ),
    ]
    assert "order" in str(advice(found, [])) and "a scheduler" in str(advice(found[1:], []))
    assert "in no checkpoint: a variable" in str(advice(found[2:], [])) and advice([], ["train:RNG"]) is None
    assert "in no checkpoint: train:RNG, which training has changed" in str(advice(found[2:], ["train:RNG"]))


@pytest.mark.parametrize(("name", "place"), [("w", "gradients.w"), ("0.bias", "gradients['0.bias']")])
def test_compare_names_unsaved_state_as_cause_of_gradient_difference(tmp_path: Path, name: str, place: str) -> None:
    lost = {"attributes": {"dict": [["unsaved", ["train:RNG"]]]}}
    a, b = (
        save(tmp_path / side, {f"rank/0/modules/{place}": floats(value), f"shared/model/{name}": floats(value)}, lost)
        for side, value in (("a", 1), ("b", 2))
    )
    compared = compare(a, b)
    found = differences(compared)
    assert [d.place for d in found] == [f"modules {place} (rank 0)", f"parameter {name}"]
    assert compared.unsaved == ["train:RNG"] and "train:RNG" in str(advice(found, compared.unsaved))


def test_framework_state_difference_has_specific_advice(tmp_path: Path) -> None:
    def told(component: str) -> str:
        a, b = (save(tmp_path / f"{component}-{n}", {}, {component: n}) for n in (1, 2))
        return str(advice(differences(compare(a, b)), []))

    assert told("user:mine").startswith("a registered object") and "framework" in told("user:lightning")


@pytest.mark.parametrize(
    ("dtype", "a", "b", "values"),
    [
        ("BF16", b"\x80\x3f", b"\x00\x40", (1.0, 2.0)), ("F16", b"\x00\x3c", b"\x00\x40", (1.0, 2.0)),
        ("F64", struct.pack("<d", 1.5), struct.pack("<d", -1.5), (1.5, -1.5)), ("U8", b"\x05", b"\x07", (5, 7)),
        ("C64", bytes(8), bytes(7) + b"\x01", None),
    ],
)  # fmt: skip
def test_compare_shows_first_differing_element_as_number(
    tmp_path: Path, dtype: str, a: bytes, b: bytes, values: Any
) -> None:
    def stored(side: str, data: bytes) -> Path:
        directory = tmp_path / side / checkpoint_dir_name(5, 1)
        file, entries = write_rank_file(directory, 0, 1, [Given("shared/model/w", dtype, (1,), 0, data)], {})
        commit(directory, manifest_of(5, 1, [file], entries))
        return directory

    (found,) = compare(stored("a", a), stored("b", b)).different
    assert found.values == values
    assert found.largest == (None if values is None else abs(values[0] - values[1]))


def test_same_files_is_true_only_for_equal_manifest_digests(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", {"shared/model/w": floats(1)}), save(tmp_path / "b", {"shared/model/w": floats(1)})
    c = save(tmp_path / "c", {"shared/model/w": floats(2)})
    assert same_files(read_manifest(a), read_manifest(b)) and not same_files(read_manifest(a), read_manifest(c))
