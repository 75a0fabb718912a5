"""The search for words that readers had to read twice; ``make check`` applies it to the product."""

from __future__ import annotations

from tests.support import plain_words


def test_word_scan_reads_comments_and_docstrings_but_not_code() -> None:
    source = '"""Whoever asks.\n\nIt is told."""\n\nwish = "anew"  # heeds it\n'
    lines = dict(plain_words.texts(source))
    assert sorted(lines) == [1, 2, 3, 5] and lines[5] == "# heeds it"


def test_name_scan_reads_functions_parameters_and_attributes() -> None:
    source = "def tell_all(beside):\n    told = 1\n    beside.wish = told\n"
    found = [name for _, name in plain_words.names(source) if plain_words.NAMES.search(name)]
    assert sorted(found) == ["beside", "tell_all", "wish"]
    assert not plain_words.NAMES.search("foretelling") and not plain_words.NAMES.search("intellect")
