"""State outside ``state_dict`` where hooks of the script's run before the first batch, and depend on where an attempt begins."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ratchet_worker.checkpoint.rank_state import JobState
from ratchet_worker.state import hidden_state
from ratchet_worker.state.hidden_state import HiddenState
from ratchet_worker.state.hook_transfer import StateTransfer
from ratchet_worker.state.object_walk import Roots
from tests.unit.hooks.state.test_encode import through_disk


class Made:
    def __init__(self, count: int) -> None:
        self.count, self.batches = count, None


def built() -> SimpleNamespace:
    """What a script builds, alike in each attempt."""
    return SimpleNamespace(
        number=1, items=[1, 2], table={"a": 1}, kinds={1}, queue=deque([1], maxlen=2), values=np.zeros(2), bits=array("d", [0.0]),
        counts=Counter("aab"), weights=torch.zeros(2), draws=np.random.default_rng(0), inner=SimpleNamespace(deep=0), gone="here",
    )  # fmt: skip


def hooks(one: Any, epoch: int) -> None:
    """What runs between building and the first batch of an attempt that begins with ``epoch``."""
    one.number = epoch
    one.items.append(epoch)
    one.table["b"] = epoch
    one.table.pop("a")
    one.kinds.add(epoch + 1)
    one.counts["a"] += 1 + epoch
    one.queue.append(epoch)
    one.values += 1 + epoch
    one.bits[0] = 1.0 + epoch
    one.weights += 1 + epoch
    one.draws.random(1 + epoch)
    one.inner.deep = epoch
    one.inner = SimpleNamespace(deep=epoch)
    one.new = [epoch]
    del one.gone


def facts(one: Any) -> dict[str, Any]:
    held = {**vars(one), "draws": one.draws.bit_generator.state, "inner": vars(one.inner)}
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in held.items()}


def begun(one: Any, epoch: int, *, resumes: bool) -> HiddenState:
    hidden, roots = HiddenState(), Roots({"it": one})
    hidden.note_built(roots, undo=resumes)
    hooks(one, epoch)
    hidden.begin(roots)
    return hidden


@pytest.mark.parametrize("back", [False, True], ids=["as the hooks left it", "as built"])
def test_hidden_state_of_earlier_attempt_overrides_early_hook_results(back: bool) -> None:
    saved, later = built(), built()
    first = begun(saved, 0, resumes=False)
    if back:
        for name, value in vars(built()).items():
            setattr(saved, name, value)
        del saved.new
    stored = first.changes().stored
    second = begun(later, 5, resumes=True)
    assert second.restore(stored) == {}
    assert facts(later) == facts(saved)
    assert facts(later) == facts(built()) or not back


def test_saved_hidden_state_is_independent_of_attempt_start_epoch() -> None:
    one, other = built(), built()
    begun(one, 0, resumes=False).changes()
    first, second = begun(built(), 3, resumes=False).changes(), begun(other, 7, resumes=True)
    second.restore(first.stored)
    assert str(second.changes()) == str(first)


def test_object_that_an_early_hook_registers_is_saved_and_restored() -> None:
    """``session.register(counts=...)`` in ``on_train_start``: the script's own objects were noted before."""

    def attempt() -> tuple[HiddenState, dict[str, int], SimpleNamespace]:
        hidden, counts, kept = HiddenState(), {"seen": 0}, SimpleNamespace(best=0.0)
        hidden.note_built(Roots({"it": built()}), undo=False)
        hidden.begin(Roots({"it": built(), "counts": counts, "kept": kept}))
        return hidden, counts, kept

    first, counts, kept = attempt()
    counts["seen"], kept.best = 5, 0.5
    second, restored, kept_again = attempt()
    assert second.restore(first.changes().stored) == {}
    assert restored == {"seen": 5} and kept_again.best == 0.5


def test_unstorable_value_made_by_early_hook_is_left_in_place() -> None:
    """It is not named, either: each attempt makes it."""
    one = built()
    hidden = HiddenState()
    hidden.note_built(Roots({"it": one}), undo=True)
    one.batches = iter([1])
    one.number = 4
    hidden.begin(Roots({"it": one}))
    assert hidden.changes()[1:] == ([], ("it.batches",))
    assert hidden.restore({}, ["it.batches"]) == {}
    assert next(one.batches) == 1 and one.number == 1


def in_some_epochs(one: Any, epoch: int) -> None:
    """A hook's function, its iterator, and one in a container."""
    if epoch == 1:
        one.shape = lambda x: 2 * x
        one.batches = iter([1, 2])
        one.items.append(iter([3]))


@pytest.mark.parametrize(
    ("then", "now", "word"), [(1, 2, "had changed it"), (2, 1, "has changed it"), (1, 1, ""), (2, 2, "")]
)
def test_unstorable_value_made_in_only_one_attempt_is_named(then: int, now: int, word: str) -> None:
    def attempt(epoch: int, *, resumes: bool) -> HiddenState:
        one = SimpleNamespace(shape=lambda x: x, batches=None, items=[0])
        hidden, roots = HiddenState(), Roots({"it": one})
        hidden.note_built(roots, undo=resumes)
        in_some_epochs(one, epoch)
        hidden.begin(roots)
        return hidden

    saved = attempt(then, resumes=False).changes()
    left = attempt(now, resumes=True).restore(saved.stored, saved.made_before_begin)
    assert sorted(left) == (["it.batches", "it.items[1]", "it.shape"] if word else [])
    assert all(word in why for why in left.values())


def test_over_100_values_made_before_begin_are_told_from_later_ones() -> None:
    def attempt() -> tuple[SimpleNamespace, HiddenState]:
        early, also_late = ([SimpleNamespace(x=None) for _ in range(150)] for _ in range(2))
        one, hidden = SimpleNamespace(early=early, also_late=also_late), HiddenState()
        hidden.note_built(Roots({"it": one}), undo=True)
        for slot in early:
            slot.x = iter([1])
        hidden.begin(Roots({"it": one}))
        return one, hidden

    one, hidden = attempt()
    for slot in one.also_late:
        slot.x = iter([1])
    saved = hidden.changes()
    assert len(saved.unsaved) == 100 and all(path.startswith("it.also_late") for path in saved.unsaved)
    assert saved.made_before_begin == tuple(sorted(f"it.early[{n}].x" for n in range(150)))
    assert attempt()[1].restore(saved.stored, saved.made_before_begin) == {}


def test_resume_report_names_value_made_in_only_one_attempt() -> None:
    def rank(epoch: int, *, resumes: bool) -> JobState:
        ddp = SimpleNamespace(module=nn.Linear(2, 2), require_forward_param_sync=True)
        state = JobState(0, torch.device("cpu"))
        state.set_model(ddp, SimpleNamespace(replicas="equal", capture=lambda *, copy: ({}, {})))  # type: ignore[arg-type]
        state.task = one = Made(0)
        state.note_built(undo=resumes)
        one.batches, one.count = iter([1]) if epoch == 1 else None, 1
        state.begin()
        return state

    for now, status in ((1, "exact"), (2, "not-exact")):
        saved = rank(1, resumes=False).capture()
        (found,) = [
            r
            for r in rank(now, resumes=True)._restore_common(saved, "exact", None, StateTransfer())
            if r.component == "attributes"
        ]
        assert found.status == status and ("task.batches" in str(found.reason)) == (now == 2)


def test_change_since_first_batch_is_named_only_in_checkpoint() -> None:
    one = SimpleNamespace(batches=None)
    hidden = HiddenState()
    hidden.note_built(Roots({"it": one}), undo=False)
    hidden.begin(Roots({"it": one}))
    one.batches = iter([1])
    assert hidden.changes()[1:] == (["it.batches"], ())


def test_value_too_large_to_copy_is_named_unless_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_state, "SMALL", 8)
    one = SimpleNamespace(values=np.zeros(8))
    hidden = HiddenState()
    hidden.note_built(Roots({"it": one}), undo=True)
    one.values += 1
    hidden.begin(Roots({"it": one}))
    saved: Any = through_disk(hidden.changes().stored)
    assert list(hidden.restore({})) == ["it.values"]
    one.values += 1
    assert hidden.restore(saved) == {} and one.values.tolist() == [1.0] * 8


def test_replaced_object_is_compared_from_time_of_replacement() -> None:
    """Reloaded data are as built in every attempt that begins there."""
    hidden, kept = HiddenState(), [0]
    hidden.note_built(Roots({"data": SimpleNamespace(kept=kept, seen=0)}), undo=False)
    hidden.begin(Roots({"data": SimpleNamespace(kept=kept, seen=0)}))
    kept.append(1)
    reloaded = SimpleNamespace(kept=kept, seen=0)
    hidden.note_built(Roots({"data": reloaded}), undo=False)
    assert list(hidden.changes().stored["changed"]) == ["data.kept"], "what was there before has its first beginning"
    reloaded.seen = 3
    assert hidden.changes().stored["changed"]["data"]["content"]["set"] == {"seen": ("value", 3)}


def test_dataset_shared_by_hook_with_model_is_restored_as_one_object() -> None:
    def attempt(*, resumes: bool) -> tuple[HiddenState, Any, Any]:
        hidden, model = HiddenState(), SimpleNamespace(data=None)
        hidden.note_built(Roots({"it": model}), undo=resumes)
        model.data = SimpleNamespace(level=0)
        loader = SimpleNamespace(dataset=model.data)
        roots = Roots({"it": model, "loader": loader})
        hidden.note_built(roots, undo=resumes)
        hidden.begin(roots)
        return hidden, model, loader

    hidden, model, _ = attempt(resumes=False)
    model.data.level = 2
    stored: Any = through_disk(hidden.changes().stored)
    later, again, loader = attempt(resumes=True)
    later.restore(stored)
    assert again.data is loader.dataset and loader.dataset.level == 2
