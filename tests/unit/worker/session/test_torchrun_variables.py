"""Where a Session without a service finds itself: torchrun's variables, whole or not."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from ratchet_contract.errors import UserError
from ratchet_contract.spec.parse import parse_spec
from ratchet_worker.session.session import Session
from ratchet_worker.session.without_service import Place, _resolve

WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
WHOLE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def _set(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    for name, value in (WHOLE | changed).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *(({name: None}, name) for name in WHOLE if name != "RANK"),
        ({"WORLD_SIZE": "two"}, "two"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        ({"LOCAL_WORLD_SIZE": "3"}, "the same --nproc-per-node on all nodes"),
        ({"RANK": "4"}, "RANK=4"),
    ],
)
def test_incomplete_torchrun_variables_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], said: str
) -> None:
    _set(monkeypatch, **changed)
    with pytest.raises(UserError, match=said) as refused:
        Place.current()
    assert refused.value.code == "torchrun-variables"


def _refusal() -> str:
    try:
        Session()
    except UserError as error:
        return str(error)
    return "made"


def test_session_in_subprocess_of_script_is_refused() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        refused = pool.apply(_refusal)
    assert "start the script by torchrun" in refused and "call it below" in refused


def test_complete_torchrun_variables_give_node_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK="3")
    place = Place.current()
    assert (place.nodes, place.node, place.ranks_per_node) == (2, 1, 2)


def test_ranks_of_a_node_share_its_cores_unless_a_number_of_threads_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, OMP_NUM_THREADS=None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    spec = parse_spec({"name": "standalone", "script": ["train.py"], "code": {"path": "."}})
    assert _resolve(spec, Place.current()).threads_per_rank == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _resolve(spec, Place.current()).threads_per_rank == 5
