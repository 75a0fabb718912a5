"""Where a Session without a service finds itself: torchrun's variables, whole or not."""

from __future__ import annotations

import multiprocessing

import pytest

from ratchet_contract.errors import UserError
from ratchet_worker.session import Session
from ratchet_worker.standalone import Place

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
def test_variables_that_make_no_group_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], said: str
) -> None:
    _set(monkeypatch, **changed)
    with pytest.raises(UserError, match=said) as refused:
        Place.here()
    assert refused.value.code == "torchrun-variables"


def _refusal() -> str:
    try:
        Session()
    except UserError as error:
        return str(error)
    return "made"


def test_a_process_that_a_script_has_started_is_no_rank() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        refused = pool.apply(_refusal)
    assert "start the script by torchrun" in refused and "call it below" in refused


def test_a_whole_set_tells_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK="3")
    place = Place.here()
    assert (place.nodes, place.node, place.ranks_per_node) == (2, 1, 2)
