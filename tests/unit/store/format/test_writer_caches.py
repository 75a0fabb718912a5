"""What a writer keeps from save to save changes nothing of what it writes: every file and manifest is that of a new writer."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ratchet_contract.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Sealer,
    TensorEntry,
    dump_entries,
    open_manifest,
    parse_entries,
)
from ratchet_contract.errors import CheckpointError, StateError
from ratchet_contract.paths import MANIFEST_NAME, checkpoint_dir_name
from ratchet_hooks.state.safetensors_header import entries_json
from ratchet_hooks.summary import HookSummary
from ratchet_store.format.json_state import encode_state
from ratchet_store.format.manifest_file import ManifestWriter
from ratchet_store.format.manifest_structure import StructureCheck
from ratchet_store.format.safetensors_header import ALIGNMENT, build_header
from ratchet_store.read.checkpoint_reader import verify
from ratchet_store.write import rank_file
from ratchet_store.write.rank_file import RankWriter
from tests.support.checkpoints import manifest_of, write_ranks
from tests.support.one_shot_writers import Given, layout_pieces, seal_manifest, write_rank_file

FIRST = [
    Given("shared/model/w", "F32", (4, 4), 4, bytes(range(32))),
    Given("shared/model/é", "BF16", (3,), 0, b"abcdef"),
    Given("shared/model/none", "F32", (0, 3), 0, b""),
    Given("shared/optimizer/step", "I64", (), 0, bytes(8)),
    Given("rank/0/rng", "U8", (5000,), 0, bytes(5000)),
    Given("shared/optimizer/count", "I64", (), 0, bytes(range(8))),
]
STATE: dict[str, Any] = {"step": 1, "é\ud800": [None, True, 1, 1.0, "\n"]}


def changed(number: int, **values: Any) -> list[Given]:
    return [piece._replace(**values) if i == number else piece for i, piece in enumerate(FIRST)]


def saves() -> Iterator[tuple[str, list[Given], Any]]:
    """What one rank saves, one after the other: between two that differ in their tensors always the first."""
    room = ALIGNMENT - len(b"".join(build_header(b"", ""))) % ALIGNMENT
    saved = {
        "other bytes": [p._replace(data=bytes(len(p.data))) for p in FIRST],
        "tensor added": [*FIRST, Given("rank/0/more", "F64", (1,), 0, bytes(8))],
        "tensor gone": FIRST[1:],
        "no tensors": [],
        "shape": changed(4, shape=(50, 100)),
        "shape of a piece": changed(0, shape=(4, 5)),
        "dtype": changed(0, dtype="I32"),
        "size": changed(4, shape=(4999,), data=bytes(4999)),
        "start": changed(0, start=5),
        "name": changed(0, name="shared/model/v"),
        "order": FIRST[::-1],
        "order of two alike": [*FIRST[:3], FIRST[5], FIRST[4], FIRST[3]],
        "another buffer": changed(0, data=np.arange(8, dtype=np.float32).reshape(2, 4)),
    }
    yield "first", FIRST, STATE
    for name, pieces in saved.items():
        yield name, pieces, STATE
        yield f"back from {name}", FIRST, STATE
    for step in range(5):
        yield f"state {step}", FIRST, {**STATE, "step": 10**step}
    for length in (room - 600, room - 1, room, 2 * room, 10, 3 * ALIGNMENT):
        yield f"state of {length}", FIRST, {"text": "x" * length}
    for step in range(40):  # steps over a page of the header somewhere
        yield f"growing {step}", FIRST, {"text": '"' * 100 * step}
    yield "no state", FIRST, None


def test_reused_rank_writer_writes_same_file_as_new_writer(tmp_path: Path) -> None:
    kept, starts, reused = RankWriter(0, 2), set(), 0
    before = None
    for name, pieces, state in saves():
        ours = kept.write(tmp_path / "kept", *layout_pieces(pieces), state)
        fresh = RankWriter(0, 2).write(tmp_path / "fresh", *layout_pieces(pieces), state)
        assert ours == fresh, name
        assert (tmp_path / "kept" / ours.file.name).read_bytes() == (
            tmp_path / "fresh" / ours.file.name
        ).read_bytes(), name
        assert write_rank_file(tmp_path / "once", 0, 2, pieces, state) == (ours.file, list(ours.tensors)), name
        assert parse_entries(ours.tensors_json) == list(ours.tensors), name
        starts |= {entry.offset for entry in ours.tensors[:1]}
        reused += before is not None and ours.tensors is before.tensors and ours.tensors_json is before.tensors_json
        before = ours
    assert len(starts) >= 4, "the state never took a page more"
    assert reused > 20, "nothing was kept"


@pytest.mark.parametrize(
    "wrong",
    [
        changed(0, data=bytes(31)),
        changed(0, data=bytes(36), start=8),
        changed(0, data=b""),
        changed(0, data=bytes(52)),
        changed(4, data=bytes(5001)),
        changed(0, dtype="C128"),
        changed(0, shape=(4, -4)),
        changed(1, name="shared/model/w#4"),
        changed(1, name=""),
        [*FIRST, FIRST[3]],
    ],
)
def test_reused_rank_writer_refuses_invalid_tensors(tmp_path: Path, wrong: list[Given]) -> None:
    writer = RankWriter(0, 1)
    pieces, data = layout_pieces(FIRST)
    first = writer.write(tmp_path / "step", pieces, data, STATE)
    raw = (tmp_path / "step" / first.file.name).read_bytes()
    with pytest.raises(StateError, match="tensor"):
        writer.write(tmp_path / "step", *layout_pieces(wrong), STATE)
    with pytest.raises(StateError, match="at /x"):
        writer.write(tmp_path / "step", pieces, data, {"x": math.nan})
    assert (tmp_path / "step" / first.file.name).read_bytes() == raw
    for given, order in (
        (data[:-1], pieces),
        (data + b"x", pieces),
        (np.zeros((len(data), 2))[:, 0], pieces),
        (data, pieces[::-1]),
    ):
        with pytest.raises(StateError, match="tensors"):
            writer.write(tmp_path / "step", order, given, STATE)
    assert (tmp_path / "step" / first.file.name).read_bytes() == raw
    assert writer.write(tmp_path / "step", pieces, data, STATE) == first


def test_rank_file_written_with_helper_thread_is_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file, "BLOCK", ALIGNMENT)
    pieces, data = layout_pieces([Given("rank/0/w", "U8", (1 << 19,), 0, np.random.default_rng(0).bytes(1 << 19))])
    alone = RankWriter(0, 1).write(tmp_path / "alone", pieces, data, STATE)
    writer, ended, real = RankWriter(0, 1), threading.Event(), os.pwrite
    helped = set[int]()

    def pwrite(fd: int, part: memoryview, at: int) -> int:
        helped.add(threading.get_ident())
        return real(fd, part, at)

    def help_all_the_time() -> None:
        while not ended.is_set():
            writer.help()

    monkeypatch.setattr(os, "pwrite", pwrite)
    thread = threading.Thread(target=help_all_the_time)
    thread.start()
    try:
        left, until = 20, time.monotonic() + 20
        while left > 0 or (thread.ident not in helped and time.monotonic() < until):  # it may come late to its work
            left -= 1
            assert writer.write(tmp_path / "both", pieces, data, STATE) == alone
            assert (tmp_path / "both" / alone.file.name).read_bytes() == (
                tmp_path / "alone" / alone.file.name
            ).read_bytes()
    finally:
        ended.set()
        thread.join(20)
    assert thread.ident in helped and len(helped) == 2


def test_rank_file_header_equals_single_json_encoding() -> None:
    """The pieces that it is put together of are a matter of cost: as one text the same comes out."""
    for members in ({}, {"a": ("F32", (2, 3), 0, 24), 'é"#4': ("U8", (), 24, 25)}):
        for state in ("", "null", '{"a":"é\\ud800"}', "x" * 5000):
            body: dict[str, Any] = {"__metadata__": {"state": state}}
            body |= {k: {"dtype": d, "shape": s, "data_offsets": [b, e]} for k, (d, s, b, e) in members.items()}
            text = json.dumps(body, separators=(",", ":")).encode()
            header = b"".join(build_header(entries_json(members), state))  # type: ignore[arg-type]
            assert header[8:].rstrip(b" ") == text and len(header) % ALIGNMENT == 0 and len(header) - len(text) < 4112
            assert int.from_bytes(header[:8], "little") == len(header) - 8


def test_state_nesting_limit_is_enforced() -> None:
    state: Any = 1
    for _ in range(64):
        state = {"k": state}
    assert json.loads(encode_state(state)) == state
    for deeper in ({"k": state}, [state]):
        with pytest.raises(StateError, match="nested deeper"):
            encode_state(deeper)


def plain(manifest: Manifest) -> bytes:
    """A sealed manifest, made at once: canonical JSON for the digest, a line per key and entry for the file."""
    data = json.loads(manifest.model_dump_json())
    body = {key: value for key, value in data.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    data["digest"] = hashlib.sha256(text.encode()).hexdigest()
    lines = []
    for key, value in data.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            shown = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        else:
            shown = json.dumps(value)
        lines.append(f' "{key}": {shown}')
    return ("{\n" + ",\n".join(lines) + "\n}").encode()


def manifests() -> Iterator[Manifest]:
    tensors = [
        TensorEntry(name=f"shared/{n}", file="f", offset=8, nbytes=4, shape=[1, i], dtype="F32")
        for i, n in enumerate(["a", "é ☃", 'q"\\\n', "\u2028"])
    ]
    first = manifest_of(1, 1, [FileEntry(name="f", rank=0, size=9, block_size=4096, blocks=["0" * 32])], tensors)
    yield first
    for step in (2, 3):
        yield first.model_copy(update={"step": step, "created": f"é{step}"})
    yield first.model_copy(update={"tensors": first.tensors[:2]})
    yield first.model_copy(update={"tensors": list(first.tensors)})
    yield first.model_copy(update={"tensors": []})
    other = first.tensors[1].model_copy(update={"offset": 9, "shape": [], "start": 3})
    yield first.model_copy(update={"tensors": [first.tensors[0], other, *first.tensors[2:]]})
    yield first.model_copy(update={"tensors": first.tensors[::-1]})
    yield first.model_copy(update={"environment": {"z": math.nan, "a": math.inf, "é": True, "n": None, "f": 0.1}})
    for alike in (True, 1, 1.0, True):  # to Python they are equal
        yield first.model_copy(update={"environment": {"é": alike}, "attempt": 2})
    yield first.model_copy(update={"files": [], "bucket_layout": [["é", "b"], []], "shared_digests": ["x"]})
    summary = HookSummary(
        name="n", rank=0, step=1, phase="steady", iteration=1, compression_rate=math.inf, elements_before=0,
        elements_after=None, bytes_before=0, bytes_after=None, residual_norm=math.nan,
    )  # fmt: skip
    yield first.model_copy(update={"hook_summaries": [summary, summary], "digest": "there already"})
    yield first.model_copy(update={"finished": True})
    grown = first.tensors[1:]
    yield first.model_copy(update={"tensors": grown})
    grown.append(other)  # the very list, with more in it
    yield first.model_copy(update={"tensors": grown})


def test_reused_sealer_seals_manifest_identically() -> None:
    kept = Sealer()
    for manifest in manifests():
        sealed, raw = kept.seal(manifest)
        assert raw == plain(manifest)
        assert seal_manifest(manifest) == (sealed, raw)
        assert open_manifest(raw).digest == sealed.digest == json.loads(raw)["digest"]
        assert open_manifest(raw).tensors == manifest.tensors


def test_structure_check_is_repeated_when_files_differ(tmp_path: Path) -> None:
    directory = tmp_path / checkpoint_dir_name(4, 2)
    files, tensors = write_ranks(directory, world_size=2)
    good = manifest_of(4, 2, files, tensors)
    check = StructureCheck()
    check.check(good)
    check.check(good.model_copy(update={"step": 5}))
    end = max(entry.offset + entry.nbytes for entry in tensors if entry.file == files[1].name)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"files": [files[0], files[1].model_copy(update={"size": end - 1})]}, "outside its file"),
        ({"files": [files[0], files[1].model_copy(update={"blocks": []})]}, "digests"),
        ({"files": files[:1]}, "one file for each"),
        ({"world_size": 3}, "one file for each"),
        ({"tensors": tensors[1:]}, "not stored exactly once|not stored whole"),
        ({"tensors": [*tensors, tensors[0]]}, "overlap"),
    ]
    for update, text in wrong:
        with pytest.raises(CheckpointError, match=text):
            check.check(good.model_copy(update=update))
        check.check(good)
    good.tensors.append(tensors[0])  # the very list, with more in it
    with pytest.raises(CheckpointError, match="overlap"):
        check.check(good)


def test_structure_check_is_repeated_for_other_world_size(tmp_path: Path) -> None:
    """The names of the files say of how many they are one: the same list cannot be right for both."""
    check = StructureCheck()
    files, tensors = write_ranks(tmp_path, world_size=1)
    good = manifest_of(4, 2, files, tensors)
    check.check(good)
    two = [FileEntry(name=f"rank-{r:05d}-of-00002.safetensors", rank=r, size=99999, block_size=4096) for r in (0, 1)]
    two = [file.model_copy(update={"blocks": ["0" * 32] * 25}) for file in two]
    with pytest.raises(CheckpointError, match="not a file of this checkpoint"):
        check.check(good.model_copy(update={"files": two, "world_size": 2}))


def test_reused_manifest_writer_commits_identical_checkpoints(tmp_path: Path) -> None:
    """Whole saves of two ranks, whose tensors and states change now and then."""
    kept, ranks = ManifestWriter(), [RankWriter(rank, 2) for rank in range(2)]
    listings: dict[str, list[TensorEntry]] = {}
    for step, (name, _, state) in enumerate(saves()):
        tensors: dict[str, list[TensorEntry]] = {"kept": [], "fresh": []}
        files: dict[str, list[FileEntry]] = {"kept": [], "fresh": []}
        for rank in range(2):
            pieces = [Given(f"rank/{rank}/own", "U8", (100 + step // 7,), 0, bytes(100 + step // 7))]
            if rank == step % 5 % 2:
                pieces.append(Given("shared/model/w", "F32", (8,), 0, bytes([step]) * 32))
            for how, writer in (("kept", ranks[rank]), ("fresh", RankWriter(rank, 2))):
                file, _, listing, _ = writer.write(
                    tmp_path / how / checkpoint_dir_name(step, 1), *layout_pieces(pieces), state
                )
                files[how].append(file)
                tensors[how] += listings.setdefault(f"{how}{listing}", parse_entries(listing))
        for how, commits in (("kept", kept), ("fresh", ManifestWriter())):
            directory = tmp_path / how / checkpoint_dir_name(step, 1)
            commits.commit(directory, manifest_of(step, 1, files[how], tensors[how]))
            assert verify(directory).ok, name
        raw = [(tmp_path / how / checkpoint_dir_name(step, 1) / MANIFEST_NAME).read_bytes() for how in tensors]
        assert raw[0] == raw[1], name


def test_tensor_entry_listing_round_trips() -> None:
    tensors = next(manifests()).tensors
    assert parse_entries(dump_entries(tensors)) == tensors and parse_entries(dump_entries([])) == []
