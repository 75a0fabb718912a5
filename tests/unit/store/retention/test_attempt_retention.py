"""Retention after every save: an attempt deletes what it wrote itself, and what it must not lose stays."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.paths import (
    MANIFEST_NAME,
    PINNED_NAME,
    VERIFIED_NAME,
    JobPaths,
    checkpoint_dir_name,
    parse_checkpoint_dir_name,
)
from ratchet_contract.spec.checkpoint import BestSpec, CheckpointSpec
from ratchet_store.retention import attempt_retention as keeper_module
from ratchet_store.retention.attempt_retention import Keeper
from ratchet_store.retention.rules import Rules
from tests.support.checkpoints import list_names, make_checkpoint


def steps(checkpoints: Path) -> list[int]:
    return [parsed[0] for name in list_names(checkpoints) if (parsed := parse_checkpoint_dir_name(name))]


def keep(checkpoints: Path, attempt: int = 1, **spec: Any) -> Keeper:
    return Keeper(checkpoints, CheckpointSpec.model_validate(spec), attempt)


def save(keeper: Keeper, checkpoints: Path, step: int, attempt: int = 1, **manifest: Any) -> list[int]:
    """Save a step; the steps that went for it."""
    deleted, notes = keeper.on_committed(make_checkpoint(checkpoints, step, attempt, **manifest))
    assert notes == []
    return [step for step, _ in deleted]


@settings(max_examples=300, deadline=None)
@given(
    found=st.sets(st.tuples(st.integers(0, 40), st.integers(1, 3)), max_size=20),
    values=st.dictionaries(st.integers(0, 40), st.sampled_from([math.nan, -math.inf, -1.0, 0.0, 2.5]), max_size=20),
    first=st.booleans(),
    last=st.integers(1, 6),
    every=st.none() | st.integers(1, 7),
    best=st.none() | st.builds(BestSpec, metric=st.just("m"), mode=st.sampled_from(["min", "max"]), count=st.integers(1, 4)),
)  # fmt: skip
def test_retention_rules_keep_last_every_and_best(
    found: set[tuple[int, int]],
    values: dict[int, float],
    first: bool,
    last: int,
    every: int | None,
    best: BestSpec | None,
) -> None:
    newest_first = sorted(found, reverse=True)
    early = newest_first[-1:] if first else []
    others = newest_first[: len(newest_first) - len(early)]
    known = {one: values[one[0]] for one in found if one[0] in values}
    rules = Rules(last, every, best)
    gone = rules.surplus(newest_first, known, first=early)
    stay = [one for one in newest_first if one not in gone]
    assert set(others[: max(last, 2)]) <= set(stay)
    if every is not None:
        assert {one for one in found if one[0] % every == 0} <= set(stay)
    numbers = [one for one in others if not math.isnan(known.get(one, math.nan))]
    if best is not None:  # newest first and a stable sort: of equal values the newer is the better
        order = sorted(numbers, key=lambda one: known[one] if best.mode == "min" else -known[one])
        assert rules.best_of(others, known) == order[: best.count]
        assert set(order[: best.count]) <= set(stay)
    for one in [one for one in stay if one not in early][max(last, 2) :]:  # and nothing stays without a reason
        assert (every is not None and one[0] % every == 0) or one in rules.best_of(others, known)
    for one in early:
        assert (one in stay) == (len(others) < 2 or rules.is_permanent(one))


def test_fenced_attempt_deletes_nothing(tmp_path: Path) -> None:
    """What it wrote may be all that the next attempt, which has saved nothing yet, could start from once more."""
    paths = JobPaths(tmp_path)
    keeper = keep(paths.checkpoints, keep_last=2)
    assert [save(keeper, paths.checkpoints, step) for step in (10, 20, 30)] == [[], [], [10]]
    paths.attempt(1).root.mkdir(parents=True)
    paths.attempt(1).fence_file.touch()
    assert [save(keeper, paths.checkpoints, step) for step in (40, 50, 60)] == [[], [], []]
    assert steps(paths.checkpoints) == [20, 30, 40, 50, 60]


def test_early_checkpoint_is_deleted_once_two_others_exist(tmp_path: Path) -> None:
    keeper = keep(tmp_path, keep_last=5, keep_best={"metric": "m", "mode": "max"})
    keeper.record_metric(1, {"m": 9.0})
    assert save(keeper, tmp_path, 1, reason="first") == []
    assert [save(keeper, tmp_path, step) for step in (10, 20, 30)] == [[], [1], []]
    kept = keep(tmp_path, 2, keep_last=2, keep_every=5)
    assert save(kept, tmp_path, 35, 2, reason="first") == []
    assert [save(kept, tmp_path, step, 2) for step in (41, 42, 43, 44)] == [[], [], [41], [42]]
    pinned = keep(tmp_path, 3, keep_last=2)
    assert save(pinned, tmp_path, 51, 3, reason="first") == []
    (tmp_path / checkpoint_dir_name(51, 3) / PINNED_NAME).touch()
    assert [save(pinned, tmp_path, step, 3) for step in (61, 62, 63)] == [[], [], [61]]
    assert steps(tmp_path) == [10, 20, 30, 35, 43, 44, 51, 62, 63]


def test_keep_last_and_keep_every_checkpoints_stay(tmp_path: Path) -> None:
    keeper = keep(tmp_path, keep_last=2, keep_every=30)
    assert [save(keeper, tmp_path, step) for step in range(10, 100, 10)] == [
        [], [], [10], [20], [], [40], [50], [], [70],
    ]  # fmt: skip
    assert steps(tmp_path) == [30, 60, 80, 90]


@pytest.mark.parametrize(("mode", "left"), [("min", [40, 60, 70]), ("max", [20, 60, 70])])
def test_keep_best_checkpoint_stays_until_a_better_one(tmp_path: Path, mode: str, left: list[int]) -> None:
    keeper = keep(tmp_path, keep_last=2, keep_best={"metric": "eval/loss", "mode": mode})
    values = {10: 0.5, 20: 0.8, 30: math.nan, 40: 0.4, 60: 0.4 if mode == "max" else 0.6, 70: math.nan}
    for step in range(10, 80, 10):
        if step % 20 == 10 and step in values:  # logged within the step, before it is saved
            keeper.record_metric(step, {"eval/loss": values[step], "loss": 9.0})
        keeper.record_metric(step + 5, {"eval/loss": -100.0 if mode == "min" else 100.0})  # of a step that is not saved
        save(keeper, tmp_path, step)
        if step % 20 == 0 and step in values:  # an evaluation after the save
            keeper.record_metric(step, {"eval/loss": values[step]})
    assert steps(tmp_path) == left


def test_keep_best_prefers_newer_on_ties_and_uses_latest_value(tmp_path: Path) -> None:
    keeper = keep(tmp_path, keep_last=2, keep_best={"metric": "m", "count": 2})
    for step in range(1, 7):
        save(keeper, tmp_path, step)
        keeper.record_metric(step, {"m": 0.0 if step == 1 else 1.0})
    keeper.record_metric(1, {"m": 2.0})  # evaluated once more
    save(keeper, tmp_path, 7)
    assert steps(tmp_path) == [5, 6, 7]
    keeper.record_metric(5, {"m": math.inf})
    save(keeper, tmp_path, 8)
    assert steps(tmp_path) == [5, 6, 7, 8]  # infinite is the worst, and still one of the two that have a value


@pytest.mark.parametrize(
    ("logged", "told"),
    [
        ({}, "no metric of that name has been logged by rank 0"),
        (
            {10: {"loss": 1.0, "lr": 0.1}},
            "no metric of that name has been logged by rank 0; the logged metrics are loss, lr",
        ),
        ({15: {"acc": 1.0}}, "it was logged at step 15, but at no step that was saved. Log it at those steps"),
        (
            {step: {"acc": 1.0} for step in (15, 25, 35, 45)},
            "it was logged at step 15, but at no step that was saved. Log it at those steps",
        ),
        ({15: {"acc": math.nan}}, "it was logged at step 15, but at no step that was saved. Log it at those steps"),
        ({10: {"acc": math.nan}}, "its value at step 10 is NaN, which is never the best"),
        ({10: {"acc": math.nan}, 15: {"acc": 1.0}}, "its value at step 10 is NaN, which is never the best"),
        (
            {step: {"acc": math.nan} for step in (10, 20, 30, 40)},
            "its value at step 10 is NaN, which is never the best",
        ),
    ],
)
def test_keep_best_with_missing_metric_is_noted_once(
    tmp_path: Path, logged: dict[int, dict[str, float]], told: str
) -> None:
    keeper = keep(tmp_path, keep_last=2, keep_best={"metric": "acc", "mode": "max"})
    notes = []
    for step in range(1, 51):
        if step in logged:
            keeper.record_metric(step, logged[step])
        if step % 10 == 0:
            notes += keeper.on_committed(make_checkpoint(tmp_path, step)).notes
    assert notes == [
        ("keep-best-unknown", f"checkpoint.keep_best: no checkpoint is kept as one of the best by 'acc': {told}")
    ]
    assert steps(tmp_path) == [40, 50]


def test_pinned_checkpoints_stay_and_do_not_count_for_keep_last(tmp_path: Path) -> None:
    keeper = keep(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        save(keeper, tmp_path, step)
    (tmp_path / checkpoint_dir_name(20, 1) / PINNED_NAME).touch()
    (tmp_path / checkpoint_dir_name(30, 1) / PINNED_NAME).touch()
    assert [save(keeper, tmp_path, step) for step in (40, 50, 60)] == [[], [], [40]]
    (tmp_path / checkpoint_dir_name(20, 1) / PINNED_NAME).unlink()
    assert save(keeper, tmp_path, 70) == [20, 50]


def test_newest_verified_checkpoint_stays(tmp_path: Path) -> None:
    keeper = keep(tmp_path, keep_last=2)
    for step in (10, 20, 30):
        save(keeper, tmp_path, step)
    (tmp_path / checkpoint_dir_name(20, 1) / VERIFIED_NAME).touch()
    assert [save(keeper, tmp_path, step) for step in (40, 50)] == [[], [30]]
    (tmp_path / checkpoint_dir_name(40, 1) / VERIFIED_NAME).touch()
    assert save(keeper, tmp_path, 60) == [20]
    assert steps(tmp_path) == [40, 50, 60]


def test_attempt_deletes_only_own_checkpoints_and_none_after_successor(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make_checkpoint(tmp_path, step, 1)
    keeper = keep(tmp_path, attempt=2, keep_last=2)
    for step in (40, 50, 60):
        save(keeper, tmp_path, step, 2)
    assert steps(tmp_path) == [10, 20, 30, 50, 60]
    make_checkpoint(tmp_path, 55, 3)
    assert save(keeper, tmp_path, 70, 2) == []


def test_missing_or_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    keeper = keep(tmp_path, keep_last=2)
    for step in (10, 20):
        save(keeper, tmp_path, step)
    next((tmp_path / checkpoint_dir_name(20, 1)).glob("rank-00000*")).unlink()
    assert save(keeper, tmp_path, 30) == []  # 10 and 30 are the two that are whole
    (tmp_path / checkpoint_dir_name(30, 1)).rename(tmp_path / "away")
    assert save(keeper, tmp_path, 40) == []
    assert save(keeper, tmp_path, 50) == [10]


def test_refused_deletion_is_noted_once_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = keep(tmp_path, keep_last=2)
    for step in (10, 20):
        save(keeper, tmp_path, step)

    def fail(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "rename", fail)
    first, second = (keeper_says(keeper, tmp_path, monkeypatch, step, fail) for step in (30, 40))
    assert [kind for kind, _ in first] == ["checkpoint-not-deleted"] and "10.a0001 was not deleted" in first[0][1]
    assert [kind for kind, _ in second] == ["checkpoint-not-deleted"] and "20.a0001 was not deleted" in second[0][1]
    monkeypatch.undo()
    assert save(keeper, tmp_path, 50) == [10, 20, 30]


def keeper_says(
    keeper: Keeper, checkpoints: Path, patch: pytest.MonkeyPatch, step: int, broken: Any
) -> list[tuple[str, str]]:
    patch.undo()
    manifest = make_checkpoint(checkpoints, step)
    patch.setattr(Path, "rename", broken)
    return keeper.on_committed(manifest).notes


def test_retention_after_save_costs_one_listing_and_few_stats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are kept for good: no manifest is read again, no directory but the one that goes is opened."""
    looks: list[str] = []
    real, listing = os.lstat, os.scandir
    monkeypatch.setattr(os, "lstat", lambda path, **k: looks.append(str(path)) or real(path, **k))
    listed: list[str] = []
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or listing(path))
    keeper = keep(tmp_path, keep_last=3, keep_every=2, keep_best={"metric": "m"})
    made = [make_checkpoint(tmp_path, step) for step in range(1, 25)]
    counts = []
    for manifest in made:
        looks.clear()
        listed.clear()
        assert all(path.name != MANIFEST_NAME for path in opened(monkeypatch, keeper, manifest))
        counts.append(len(looks))
        assert listed.count(str(tmp_path)) == 1
    assert max(counts[12:]) == max(counts[18:]) <= 60


def opened(monkeypatch: pytest.MonkeyPatch, keeper: Keeper, manifest: Manifest) -> list[Path]:
    """What ``committed`` opened."""
    out: list[Path] = []
    real = os.open
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, *a, **k: out.append(Path(path)) or real(path, *a, **k))
        keeper.record_metric(manifest.step, {"m": 1.0})
        keeper.on_committed(manifest)
    return out


def test_keeper_metrics_are_thread_safe_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "_MAX_PENDING_VALUES", 50)
    keeper = keep(tmp_path, keep_last=2, keep_best={"metric": "m", "mode": "max"})
    keeper.record_metric(1, {"m": 100.0})
    save(keeper, tmp_path, 1)

    def log() -> None:
        for step in range(2, 5000):
            keeper.record_metric(step, {"m": float(step % 7)})

    thread = threading.Thread(target=log)
    thread.start()
    for step in range(2, 8):
        save(keeper, tmp_path, step)
    thread.join()
    save(keeper, tmp_path, 5000)
    assert steps(tmp_path) == [1, 7, 5000]
