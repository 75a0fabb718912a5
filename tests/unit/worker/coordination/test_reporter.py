"""What a rank reports of its speed. The clock is a stand-in, so that rates are exact; the spool is the real one."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from ratchet_contract.errors import UserError
from ratchet_contract.protocol.messages import Alert, Progress, RankMessage
from ratchet_worker.coordination import reporter as module
from ratchet_worker.coordination.reporter import Reporter, metric_value
from ratchet_worker.ipc.report_spool import Spool

_MESSAGE: TypeAdapter[RankMessage] = TypeAdapter(RankMessage)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, float | None]]]:
    """``told((time, step, always), ...)``: step and rate of every progress message of one attempt."""

    def run(*steps: tuple[float, int, bool]) -> list[tuple[int, float | None]]:
        path = tmp_path / f"spool-{len(list(tmp_path.iterdir()))}.jsonl"
        reporter = Reporter(Spool(path), 0)
        for instant, step, always in steps:
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda now=instant: now))
            reporter.report_progress(step, 100, None, always=always)
        monkeypatch.undo()
        reporter.close()
        messages = [_MESSAGE.validate_json(line) for line in path.read_text().splitlines()]
        return [(m.step, m.steps_per_second) for m in messages if isinstance(m, Progress)]

    return run


def test_throughput_is_steps_over_seconds_between_two_messages(told: Callable[..., list[tuple[int, float]]]) -> None:
    steps = [(10.0, 41, False), (10.25, 45, False), (11.0, 57, False), (13.0, 59, False)]
    assert told(*steps) == [(41, None), (57, 16.0), (59, 1.0)]


def test_throughput_is_none_when_no_step_was_done(told: Callable[..., list[tuple[int, float]]]) -> None:
    assert told((1.0, 0, True), (2.0, 0, True), (4.0, 10, True), (4.0, 11, True)) == [
        (0, None), (0, None), (10, 5.0), (11, None)
    ]  # fmt: skip


@pytest.mark.parametrize("value", [[1, 2], None, "high", torch.ones(2), {"a": 1.0}])
def test_non_numeric_metric_value_is_refused_by_name(value: object) -> None:
    with pytest.raises(
        UserError, match=r"metric 'acc' is a number or a tensor of one element, not a (list|NoneType|str|Tensor|dict)"
    ):
        metric_value("acc", value)  # type: ignore[arg-type]


def test_complex_metric_value_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"metric 'acc' is a number.*not a complex Tensor.*log each number by a name"):
        metric_value("acc", torch.tensor([1 + 2j]))


@pytest.mark.parametrize("value", [10**400, -(10**5000), Fraction(10**400)], ids=["int", "no text", "fraction"])
def test_metric_value_beyond_a_float_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UserError, match="metric 'acc' is too large for a float"):
        metric_value("acc", value)


def alert_of(path: Path, title: Any, text: Any = "", level: str = "info") -> Alert:
    reporter = Reporter(Spool(path), 1)
    reporter.alert(7, title, text, level)
    reporter.close()
    message = _MESSAGE.validate_json(path.read_text())
    assert isinstance(message, Alert)
    return message


def test_alert_is_cut_visibly_and_its_title_is_one_line(tmp_path: Path) -> None:
    sent = alert_of(tmp_path / "spool", "two\nlines " + "t" * 300, "first\nsecond" + "x" * 2000, "error")
    assert (sent.rank, sent.step, sent.level) == (1, 7, "error")
    assert sent.title == "two lines " + "t" * 187 + "..." and len(sent.title) == 200
    assert sent.text.startswith("first\nsecondx") and sent.text.endswith("x...") and len(sent.text) == 1000
    exact = alert_of(tmp_path / "exact", "t" * 200, "x" * 1000)
    assert (exact.title, exact.text) == ("t" * 200, "x" * 1000)
    assert alert_of(tmp_path / "odd", "a\ud800b").title == "a?b"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a", "b", "fatal"), "an alert's level is info, warning, error, not 'fatal'"),
        (("a", "b", None), "an alert's level is info, warning, error, not 'None'"),
        (("", "b"), "an alert needs a title"),
        ((" \n", "b"), "an alert needs a title"),
        ((3, "b"), "use str"),
        (("a", torch.tensor(1.0)), "use str"),
    ],
)
def test_invalid_alert_is_refused_with_the_cure(tmp_path: Path, arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        alert_of(tmp_path / "spool", *arguments)
