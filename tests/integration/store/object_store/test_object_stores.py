# ruff: noqa: F811  (fixtures)
"""Object stores: one suite for obstore's memory, a local directory and a real S3 server; then faults, which only the last has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import PINNED_NAME
from ratchet_store.object_store import client as objects_module
from ratchet_store.object_store import upload
from ratchet_store.object_store.client import BRIEF, ObjectStore, open_store
from ratchet_store.object_store.download import Progress, fetch, fetch_newest, newest_local
from ratchet_store.object_store.remote_checkpoints import RemoteCheckpoints, open_job_checkpoints
from ratchet_store.object_store.upload import Mirror, Step
from ratchet_store.retention.delete import delete
from tests.support.checkpoints import JOB, list_names, make_chain, make_checkpoint
from tests.support.object_stores import BUCKET, PATIENT, S3Server, free_port, make_object_store, s3, s3_server  # noqa: F401

Make = Callable[[str], ObjectStore]
ALL = [Segment(attempt=1, after_step=0)]
WRITERS = int(os.environ.get("RATCHET_TEST_MANIFEST_WRITERS", "16"))


class Place:
    """A job's local directory, and its prefix in a store."""

    def __init__(self, root: Path, store: ObjectStore) -> None:
        self.checkpoints, self.quarantine = root / "checkpoints", root / "quarantine"
        self.remote = RemoteCheckpoints(store, JOB)

    def mirror(self, attempt: int = 1, lineage: list[Segment] = ALL) -> Mirror:
        return Mirror(self.remote, self.checkpoints, self.quarantine, lineage, attempt)

    def there(self) -> dict[str, list[str]]:
        """Names of objects by checkpoint."""
        found: dict[str, list[str]] = {}
        for path in sorted(self.remote.objects.list()):
            folder, _, name = path.partition("/")
            found.setdefault(folder, []).append(name)
        return found

    def committed(self) -> list[str]:
        return [folder for folder, held in self.there().items() if "MANIFEST.json" in held]

    def bring(self, lineage: list[Segment] = ALL) -> Manifest | None:
        return fetch_newest(
            self.remote, self.checkpoints, self.quarantine, lineage, newest_local(self.checkpoints, lineage)
        ).fetched


@pytest.fixture
def place(make_object_store: Make, tmp_path: Path) -> Place:
    return Place(tmp_path, make_object_store(f"{JOB}/checkpoints"))


def run(mirror: Mirror) -> list[Step]:
    """Steps until there is nothing to do."""
    steps = []
    for _ in range(50):
        steps.append(mirror.step())
        if steps[-1].idle:
            return steps
    raise AssertionError("it does not come to rest")


def same_bytes(left: Path, right: Path) -> bool:
    return list_names(left) == list_names(right) and all(
        (left / name).read_bytes() == (right / name).read_bytes() for name in list_names(left)
    )


# --- the store ---------------------------------------------------------------------------------------------------------


def test_object_store_puts_reads_lists_and_deletes_objects(
    make_object_store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "PART", 5 << 20)
    store = make_object_store("plain")
    big = os.urandom(12 << 20)
    store.put("a/small", [b"12", b"345"], 5, "digest-of-it")
    store.put("a/big", (big[i : i + (1 << 20)] for i in range(0, len(big), 1 << 20)), len(big), "other")
    assert store.list() == {"a/small": 5, "a/big": 12 << 20}
    assert store.list("b/") == {}
    assert store.head("a/big").size == 12 << 20
    assert store.head("a/small").digest in ("digest-of-it", None)
    assert bytes(store.get_range("a/big", 7 << 20, (7 << 20) + 9)) == big[7 << 20 : (7 << 20) + 9]
    assert store.get("a/small", 5) == b"12345"
    with pytest.raises(CheckpointError, match="more than the 4"):
        store.get("a/small", 4)
    store.delete(["a/small", "never/there"])
    store.delete(["a/small"])
    assert list(store.list()) == ["a/big"]
    for ask in (lambda: store.head("a/small"), lambda: store.get_range("a/small", 0, 1)):
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert caught.value.code == "checkpoint-missing"


def test_put_whose_source_raises_leaves_no_object(make_object_store: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "PART", 5 << 20)
    store = make_object_store("torn")

    def torn():  # type: ignore[no-untyped-def]
        yield b"x" * (6 << 20)
        raise CheckpointError("the disk is gone", code="checkpoint-unreadable")

    with pytest.raises(CheckpointError, match="the disk is gone"):
        store.put("big", torn(), 12 << 20, "d")
    assert store.list() == {}


def test_put_if_absent_lets_one_of_many_concurrent_writers_win(make_object_store: Make) -> None:
    store, won, start = make_object_store("race"), [], threading.Barrier(WRITERS)

    def write(number: int) -> None:
        start.wait(10)
        if store.put_if_absent("MANIFEST.json", f"writer {number}".encode()):
            won.append(number)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1
    assert store.get("MANIFEST.json", 100) == f"writer {won[0]}".encode()


@pytest.mark.parametrize("uri", ["memory://bucket", "file:///tmp", "http://127.0.0.1/x", "s3:/b", ""])
def test_open_store_refuses_unsupported_uri_schemes(uri: str) -> None:
    with pytest.raises(ValueError, match="must start with one of s3, gs, az"):
        open_store(uri)


# --- the mirror --------------------------------------------------------------------------------------------------------


def test_mirror_uploads_committed_checkpoints_newest_first_and_once(place: Place) -> None:
    chain = make_chain(place.checkpoints, 10, 20, 30)
    uploaded = [step.uploaded for step in run(place.mirror()) if step.uploaded]
    assert [u.manifest.step for u in uploaded] == [30, 20, 10]
    assert all(u.nbytes > u.manifest.size for u in uploaded)
    assert place.committed() == [manifest.id for manifest in chain]
    again = [step.uploaded for step in run(place.mirror(attempt=2)) if step.uploaded]
    assert [u.nbytes for u in again] == [0, 0, 0]
    assert uploaded[0].uri.endswith(f"/{JOB}/checkpoints/{chain[2].id}")


def test_mirror_uploads_only_committed_checkpoints_of_the_lineage(place: Place) -> None:
    make_chain(place.checkpoints, 10, 20)
    (make_torn := place.checkpoints / "step-000000000030.a0001").mkdir()
    (make_torn / "rank-00000-of-00002.safetensors").write_bytes(b"half")
    make_checkpoint(place.checkpoints, 40, 2)  # of another attempt, on no lineage of ours
    run(place.mirror(attempt=1))
    assert place.committed() == ["step-000000000010.a0001", "step-000000000020.a0001"]
    assert list(place.there()) == place.committed()


def test_mirror_deletes_expired_copies_except_the_last_and_pinned_ones(place: Place) -> None:
    make_chain(place.checkpoints, 10, 20, 30)
    pinned = place.checkpoints / "step-000000000010.a0001"
    (pinned / PINNED_NAME).touch()
    mirror = place.mirror()
    run(mirror)
    assert PINNED_NAME in place.there()[pinned.name]
    for directory in sorted(place.checkpoints.glob("step-*")):
        delete(directory)
    removed = [one for step in run(mirror) for one in step.removed]
    assert removed == [(20, 1)]
    assert place.committed() == [pinned.name, "step-000000000030.a0001"]


def test_unchanged_store_is_listed_every_ten_minutes_and_a_lost_copy_is_replaced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (manifest,) = make_chain(place.checkpoints, 10)
    mirror, list_checkpoints, listed, now = place.mirror(), place.remote.list_checkpoints, [], 1000.0
    monkeypatch.setattr(upload, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(place.remote, "list_checkpoints", lambda: listed.append(now) or list_checkpoints())
    run(mirror)
    place.remote.remove(manifest.id)
    for now, copies in ((1599.0, []), (1601.0, [manifest.id]), (2200.0, [manifest.id]), (2202.0, [manifest.id])):
        run(mirror)
        assert place.committed() == copies, now
    assert listed == [1000.0, 1601.0, 2202.0]


def test_mirror_copies_and_removes_pin_marks(place: Place) -> None:
    make_chain(place.checkpoints, 10)
    directory, mirror = place.checkpoints / "step-000000000010.a0001", place.mirror()
    run(mirror)
    (directory / PINNED_NAME).touch()
    run(mirror)
    assert PINNED_NAME in place.there()[directory.name]
    (directory / PINNED_NAME).unlink()
    run(mirror)
    assert PINNED_NAME not in place.there()[directory.name]


def test_mirror_deletes_no_copy_after_the_local_directory_was_lost(place: Place) -> None:
    make_chain(place.checkpoints, 10, 20, 30)
    run(place.mirror())
    for directory in sorted(place.checkpoints.iterdir()):
        delete(directory) if directory.is_dir() else directory.unlink()
    place.checkpoints.rmdir()
    assert place.bring() is not None
    run(place.mirror(attempt=2))
    assert len(place.committed()) == 3
    assert [p.name for p in place.checkpoints.glob("step-*")] == ["step-000000000030.a0001"]


def test_mirror_keeps_the_copy_of_a_quarantined_checkpoint(place: Place) -> None:
    make_chain(place.checkpoints, 10, 20)
    mirror = place.mirror()
    run(mirror)
    place.quarantine.mkdir()
    (place.checkpoints / "step-000000000010.a0001").rename(place.quarantine / "step-000000000010.a0001")
    assert [one for step in run(mirror) for one in step.removed] == []
    assert len(place.committed()) == 2


def test_mirror_sweeps_remains_of_dead_attempts_only(place: Place) -> None:
    store = place.remote.objects
    file = "rank-00000-of-00001.safetensors"
    store.put(f"step-000000000005.a0001/{file}", [b"half"], 4, "d")  # no manifest, of a dead attempt
    store.put_if_absent("step-000000000006.a0001/MANIFEST.json", b"{}")  # a zombie's, over data that were swept
    store.put(f"step-000000000009.a0002/{file}", [b"ours"], 4, "d")
    store.put(f"step-000000000007.a0001/{file}", [b"bad"], 3, "d")
    store.put_if_absent("step-000000000007.a0001/MANIFEST.json.quarantined", b"{}")
    make_checkpoint(place.checkpoints, 20, 2)
    run(place.mirror(attempt=2))
    assert list(place.there()) == [
        "step-000000000007.a0001",
        "step-000000000009.a0002",
        "step-000000000020.a0002",
    ]


def test_mirror_does_not_replace_another_checkpoint_of_the_same_name(place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path / "other", place.remote.objects)
    make_checkpoint(other.checkpoints, 20, 1, seed=7)
    run(other.mirror())
    before = place.remote.raw_manifest("step-000000000020.a0001")
    make_chain(place.checkpoints, 10, 20)
    steps = run(place.mirror())
    (failed,) = [step.failed for step in steps if step.failed]
    assert failed.folder == "step-000000000020.a0001"
    assert "another checkpoint" in failed.error
    assert [s.uploaded.manifest.step for s in steps if s.uploaded] == [10]
    assert place.remote.raw_manifest("step-000000000020.a0001") == before


def test_mirror_does_not_upload_a_locally_damaged_checkpoint(place: Place) -> None:
    make_chain(place.checkpoints, 10, 20)
    file = place.checkpoints / "step-000000000020.a0001" / "rank-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    mirror = place.mirror()
    (failed,) = [step.failed for step in run(mirror) if step.failed]
    assert "differs from the saved data" in failed.error
    assert place.committed() == ["step-000000000010.a0001"]
    assert mirror.pending() == ["step-000000000020.a0001"]


def test_checkpoint_deleted_during_upload_leaves_no_objects(place: Place) -> None:
    make_chain(place.checkpoints, 10)
    directory, calls = place.checkpoints / "step-000000000010.a0001", []

    def deleted() -> None:
        calls.append(1)
        if len(calls) == 3:
            delete(directory)

    mirror = place.mirror()
    mirror.step(deleted)
    run(mirror)
    assert place.there() == {}


# --- fetching ----------------------------------------------------------------------------------------------------------


def test_checkpoint_fetched_after_a_lost_disk_is_bit_identical(place: Place, tmp_path: Path) -> None:
    make_chain(place.checkpoints, 10, 20)
    run(place.mirror())
    elsewhere = Place(tmp_path / "elsewhere", place.remote.objects)
    fetched = elsewhere.bring()
    assert fetched is not None
    assert fetched.step == 20
    assert same_bytes(elsewhere.checkpoints / fetched.id, place.checkpoints / fetched.id)
    assert list_names(elsewhere.checkpoints) == [fetched.id]
    assert elsewhere.bring() is None


def test_fetch_ignores_checkpoints_outside_the_lineage(place: Place, tmp_path: Path) -> None:
    make_chain(place.checkpoints, 10, 20)
    make_checkpoint(place.checkpoints, 30, 2)
    run(place.mirror(lineage=[*ALL, Segment(attempt=2, after_step=20)]))
    elsewhere = Place(tmp_path / "elsewhere", place.remote.objects)
    fetched = elsewhere.bring([Segment(attempt=1, after_step=0, until_step=15)])
    assert fetched is not None
    assert fetched.step == 10


def test_fetch_quarantines_a_damaged_copy_and_takes_the_previous_one(place: Place, tmp_path: Path) -> None:
    make_chain(place.checkpoints, 10, 20)
    run(place.mirror())
    name = "step-000000000020.a0001/rank-00001-of-00002.safetensors"
    data = bytearray(place.remote.objects.get(name, 1 << 20))
    data[-3] ^= 1
    place.remote.objects.put(name, [bytes(data)], len(data), "d")
    elsewhere = Place(tmp_path / "elsewhere", place.remote.objects)
    found = fetch_newest(elsewhere.remote, elsewhere.checkpoints, elsewhere.quarantine, ALL, None)
    assert found.fetched is not None
    assert found.fetched.step == 10
    (note,) = found.notes
    assert "step-000000000020.a0001" in note and "set aside" in note
    assert place.committed() == ["step-000000000010.a0001"]
    assert "MANIFEST.json.quarantined" in place.there()["step-000000000020.a0001"]
    assert list_names(elsewhere.checkpoints) == ["step-000000000010.a0001"]


def test_stopped_fetch_leaves_the_copy_in_the_store_as_it_is(place: Place, tmp_path: Path) -> None:
    make_chain(place.checkpoints, 10)
    run(place.mirror())
    before = place.there()
    elsewhere, progress = Place(tmp_path / "elsewhere", place.remote.objects), Progress()
    progress.stop.set()
    with pytest.raises(CheckpointError, match="was stopped") as caught:
        fetch_newest(elsewhere.remote, elsewhere.checkpoints, elsewhere.quarantine, ALL, None, progress)
    assert caught.value.code == "checkpoint-remote"
    assert place.there() == before


def test_fetch_replaces_a_damaged_or_incomplete_local_checkpoint(place: Place) -> None:
    make_chain(place.checkpoints, 10, 20)
    run(place.mirror())
    damaged, torn = (place.checkpoints / f"step-0000000000{n}0.a0001" for n in (2, 1))
    file = damaged / "rank-00000-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (torn / "MANIFEST.json").unlink()
    fetched = place.bring()
    assert fetched is not None
    assert fetched.step == 20
    assert list_names(place.quarantine) == [damaged.name]
    fetch(place.remote, torn.name, place.checkpoints, place.quarantine)
    assert newest_local(place.checkpoints, [Segment(attempt=1, after_step=0, until_step=10)]) == (10, 1)


# --- faults of a real server -------------------------------------------------------------------------------------------


def s3_place(root: Path) -> Place:
    place = Place(root, open_store(f"s3://{BUCKET}/team", f"{JOB}/checkpoints", PATIENT))
    place.remote = open_job_checkpoints(f"s3://{BUCKET}/team", JOB, PATIENT)
    return place


def test_upload_and_fetch_retry_server_errors_and_broken_connections(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "PART", 5 << 20)
    place, seen, kinds = s3_place(tmp_path), [], {"PUT": ["503", "reset", "503"], "POST": ["503"], "GET": ["503"]}
    make_checkpoint(place.checkpoints, 10, scale=6000)  # 12 MB: three parts a file

    def fault(method: str, path: str) -> str | None:
        if method == "PUT" and "partNumber" not in path:
            return None
        kind = kinds.get(method, []).pop(0) if kinds.get(method) else None
        seen.append(kind)
        return kind

    s3.fault = fault
    (uploaded,) = [step.uploaded for step in run(place.mirror()) if step.uploaded]
    assert {"503", "reset"} <= set(seen)
    elsewhere = s3_place(tmp_path / "elsewhere")
    assert elsewhere.bring() is not None
    assert same_bytes(elsewhere.checkpoints / uploaded.manifest.id, place.checkpoints / uploaded.manifest.id)


def test_upload_to_an_unavailable_store_fails_and_succeeds_later(s3: S3Server, tmp_path: Path) -> None:
    place = s3_place(tmp_path)
    make_chain(place.checkpoints, 10)
    away = open_store(f"s3://{BUCKET}", "", BRIEF, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"})
    s3.fault = lambda _method, _path: "503"
    mirror = Mirror(
        open_job_checkpoints(f"s3://{BUCKET}/team", JOB, BRIEF), place.checkpoints, place.quarantine, ALL, 1
    )
    with pytest.raises(CheckpointError) as caught:
        mirror.step()
    assert caught.value.code == "checkpoint-remote"
    assert away.url == f"s3://{BUCKET}"
    s3.fault = lambda _method, _path: None
    assert run(mirror)[0].uploaded is not None


def test_object_store_refusal_error_contains_no_credentials(s3: S3Server) -> None:
    s3.fault = lambda _method, _path: "403"
    with pytest.raises(CheckpointError) as caught:
        open_store(f"s3://{BUCKET}/team", "", BRIEF).head("x")
    assert caught.value.code == "checkpoint-remote-denied"
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.detail  # which variables are looked at
    with pytest.raises(CheckpointError) as caught:
        open_store(f"s3://{BUCKET}/team", "", BRIEF).put("x", [b"1"], 1, "d")
    assert "Made403" in caught.value.detail
    assert not any(value in caught.value.detail for name, value in s3.environ.items() if "KEY" in name)
    s3.fault = lambda _method, _path: None
    with pytest.raises(CheckpointError, match="no such bucket") as caught:
        open_store("s3://nobody-has-this", "", BRIEF).list()
    assert caught.value.code == "checkpoint-remote-denied"


_UPLOADER = """
import sys
from pathlib import Path
from ratchet_contract.checkpoint.resume_report import Segment
from ratchet_store.object_store.upload import Mirror
from ratchet_store.object_store.remote_checkpoints import open_job_checkpoints
root = Path(sys.argv[1])
remote, lineage = open_job_checkpoints(sys.argv[2], sys.argv[3]), [Segment(attempt=1, after_step=0)]
mirror = Mirror(remote, root / "checkpoints", root / "quarantine", lineage, 1)
while True:
    mirror.step()
"""


def test_killed_upload_is_completed_by_the_next_attempt(s3: S3Server, tmp_path: Path) -> None:
    place = s3_place(tmp_path)
    (manifest,) = make_chain(place.checkpoints, 10)
    s3.fault = lambda method, path: "hang" if method == "PUT" and "rank-00001" in path else None
    process = subprocess.Popen([sys.executable, "-c", _UPLOADER, str(tmp_path), f"s3://{BUCKET}/team", JOB])
    try:
        assert s3.hung.wait(30)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert place.there() == {manifest.id: ["rank-00000-of-00002.safetensors"]}
    s3.fault = lambda _method, _path: None
    s3.requests.clear()
    run(place.mirror(attempt=2))
    assert place.committed() == [manifest.id]
    sent = [path for method, path in s3.requests if method == "PUT"]
    assert not any("rank-00000" in path for path in sent), "what was whole was sent again"
    elsewhere = s3_place(tmp_path / "elsewhere")
    assert elsewhere.bring() is not None
    assert same_bytes(elsewhere.checkpoints / manifest.id, place.checkpoints / manifest.id)
