"""Every event of a job's history is explained on a page, under the name that ``ratchet events`` shows."""

from __future__ import annotations

import re
from typing import get_args

from ratchet_contract.phases import Event, EventType, NoteType
from ratchet_hooks.ddp.numeric_warnings import Code
from tests.support.docs import ROOT


def test_tables_of_troubleshooting_have_all_events_and_no_others() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| event \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = re.findall(r"^\| (.*?) \|", "".join(tables), re.MULTILINE)
    named = [name for cell in cells for name in re.findall("`(.*?)`", cell)]
    not_stored = {Event.PATCH, Event.DELETE, Event.FORK}  # the history has ``patched`` and ``forked`` for two of them
    notes = {f"note.{one}" for one in (*NoteType, *(f"hook-{code}" for code in get_args(Code)))}
    assert sorted(named) == sorted({*EventType, *Event} - not_stored | notes)
