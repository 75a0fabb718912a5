"""What commands print elsewhere than on a terminal: a line per row, numbers that are read at a glance."""

from __future__ import annotations

import pytest

from ratchet_client.cli import output

MESSAGE = "TypeError: batch\n- Evaluation strategy: epoch\n- Save strategy: steps " + "and so on " * 20


def test_a_row_is_one_line_and_a_long_reason_ends_in_an_ellipsis(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["ID", "WHY"], [["job-1", MESSAGE], ["job-2", "waits"]], cut="WHY")
    header, first, second = capsys.readouterr().out.splitlines()
    assert header == "ID     WHY" and second == "job-2  waits"
    assert (
        first.startswith("job-1  TypeError: batch - Evaluation strategy") and first.endswith("…") and len(first) < 110
    )


def test_other_tables_keep_the_whole_text_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(["ATTEMPT", "MESSAGE"], [["1", MESSAGE]])
    assert capsys.readouterr().out.splitlines()[1] == "1        " + " ".join(MESSAGE.split())


def test_fields_are_parted_into_groups_and_what_is_empty_leaves_no_gap(capsys: pytest.CaptureFixture[str]) -> None:
    output.fields([("none", None)], [("id", "job-1"), ("owner", "")], [("none", None)], [("last step", 0)])
    assert capsys.readouterr().out.splitlines() == ["id         job-1", "", "last step  0"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (512, "512"), (999, "999"), (1000, "1 k"), (73473660, "73.5 M"), (1990560, "1.99 M"), (999_600, "1 M")],
)
def test_counts_have_three_digits_and_a_unit(number: int, words: str) -> None:
    assert output.count(number) == words
