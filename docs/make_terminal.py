"""``docs/terminal.svg`` of the README: what ``make demo`` prints, shortened: ``python docs/make_terminal.py``. Runs the demo (a
minute)."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

PICTURE: Final = Path(__file__).with_name("terminal.svg")
_SHOWN: Final = re.compile(
    r"killed (rank|the service)|to the next step|resumed from|new service found|"
    r"api-preempt$|^JOB|^digits-interrupted|tensors compared|^IDENTICAL"
)
"""Of the demo's lines those that are drawn."""
_GOOD: Final = re.compile(r"^ *[0-9.]+ s from SIGKILL|\bexact\b|identical|IDENTICAL|0 differ")
_FONT: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Fonts that a viewer would have to fetch."""
_BAD: Final = re.compile(r"^ *killed .*|rank-killed")


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "examples.demo", place]
        done = subprocess.run(command, cwd=PICTURE.parents[1], stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.partition(". The loss of both")[0] for line in done.stdout.splitlines() if _SHOWN.search(line)]
    console = Console(record=True, width=96, file=StringIO(), force_terminal=True)
    console.print(Text("$ make demo", style="bold"))
    for line in lines:
        text = Text(line)
        text.highlight_regex(_GOOD, "bold green")
        text.highlight_regex(_BAD, "bold red")
        console.print(text)
    drawn = console.export_svg(title="killed, preempted, its service restarted")
    PICTURE.write_text(_FONT.sub("", drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
