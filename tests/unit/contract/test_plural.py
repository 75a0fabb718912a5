"""A number and its noun: ``1 step``, ``2 steps``, wherever the number may be one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from ratchet_contract.plural import pluralize
from tests.support.docs import ROOT

NOUNS = (
    "attempt|check|checkpoint|core|failure|file|GPU|item|job|metric|mistake|node|note|pod|point|preemption|rank|round|slot|step|"
    "tensor|thread|token|value|warning"
)
NEVER_ONE = {
    "len(found)", "len(error.errors)", "len(run)", "len(jobs)",  # told where there are several
    "len(ids)", "len(matching)", "there", "most", "limits.max_files", "self.limits.entries", "self._bounds.series",
    "_count(self.with_unknown_attempts)",  # of jobs
    "home", "str(entry.source)",  # paths
    "nodes",  # told where there are several
}  # fmt: skip


def plurals() -> Iterator[tuple[str, str]]:
    """Every value of an f-string of client and service that a plural follows: where, and its expression."""
    follows = re.compile(rf" (?:[a-z]+ |CPU )?(?:{NOUNS})s\b")
    for top in ("client", "service"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = node.values if isinstance(node, ast.JoinedStr) else []
                for value, after in pairwise(parts):
                    if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                        continue
                    if value.format_spec is None and follows.match(str(after.value)):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", ast.unparse(value.value)


def test_messages_with_counts_use_counted_for_plural_nouns() -> None:
    assert [pluralize(n, "redone step") for n in (0, 1, 2)] == ["0 redone steps", "1 redone step", "2 redone steps"]
    found = list(plurals())
    assert {text for _, text in found} & NEVER_ONE, "the look finds something"
    wrong = [(where, text) for where, text in found if text not in NEVER_ONE and not text.rpartition(".")[2].isupper()]
    assert wrong == []
