"""The commands' output: rich on a terminal, plain aligned text elsewhere (no colour codes, no wrapping), JSON on request."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table

_STYLES = {
    "RUNNING": "cyan", "STARTING": "cyan", "STOPPING": "yellow", "QUEUED": "yellow", "SUSPENDED": "magenta",
    "SUCCEEDED": "green", "succeeded": "green", "exact": "green", "ok": "green", "committed": "green", "LAUNCHING": "cyan",
    "FAILED": "bold red", "failed": "red", "lost": "red", "damaged": "bold red", "quarantined": "red", "not-exact": "bold red",
    "warning": "yellow", "not-checked": "yellow", "CANCELLED": "dim", "ENDED": "dim", "deleted": "dim", "preempted": "yellow",
}  # fmt: skip


_TEXT = 24
"""Minimum width of a cell of running text; if it does not fit, other columns are omitted."""
_CUT = 100
"""Maximum width of a truncated text if no terminal sets a limit."""


def on_terminal() -> bool:
    """Return True if standard output is a terminal, unless ``TERM`` is ``dumb`` (no colours, no redrawn lines)."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def style_of(word: str) -> str:
    """Return rich's style for ``word`` if it is in ``_STYLES``, else "". A remark that follows the word after ", " or " (" is
    ignored."""
    return _STYLES.get(word.partition(", ")[0].partition(" (")[0], "")


def line(text: str = "") -> None:
    """Print ``text`` and a line end on standard output unchanged: no markup, no wrapping."""
    sys.stdout.write(text + "\n")


def sentence(text: str, indent: str = "") -> None:
    """Print a paragraph on standard output, wrapped on a terminal. ``indent``: text before its lines."""
    line(wrap_text(text, indent))


def wrap_text(text: str, indent: str = "") -> str:
    """Return ``text`` wrapped to the terminal's width, elsewhere not wrapped. ``indent``: text before each line; if empty, later
    wrapped lines begin with two spaces."""
    if not on_terminal():
        return indent + text
    later = indent or "  "
    parts = textwrap.wrap(text, console().width, initial_indent=indent, subsequent_indent=later, break_on_hyphens=False)
    return "\n".join(parts)


def flush() -> None:
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a message for people on standard error, after a flush of standard output."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def emit(data: BaseModel | Sequence[BaseModel] | dict[str, Any]) -> None:
    """Print ``data`` on standard output as one JSON document with indentation. NaN and infinity are printed as strings."""
    line(json.dumps(_plain(data), indent=2, ensure_ascii=False))


def emit_line(data: BaseModel | dict[str, Any]) -> None:
    """Print ``data`` on standard output as one line of JSON, and flush it."""
    line(json.dumps(_plain(data), separators=(",", ":"), ensure_ascii=False))
    sys.stdout.flush()


def _plain(data: Any) -> Any:
    """Return ``data`` with models as decoded JSON, and with numbers that are not finite as strings."""
    if isinstance(data, dict):
        return {k: _plain(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(item) for item in data]
    if isinstance(data, float) and not math.isfinite(data):
        return "NaN" if math.isnan(data) else "Infinity" if data > 0 else "-Infinity"
    # Not model_dump: only model_dump_json writes non-finite numbers as strings, as the API does.
    return json.loads(data.model_dump_json()) if hasattr(data, "model_dump_json") else data


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), drop: Sequence[str] = (),
    cut: str | None = None, empty: str = "",
) -> list[str]:  # fmt: skip
    """Print a table on standard output, and return the omitted columns. ``right``: columns that are aligned right. ``drop``:
    columns that may be omitted on a narrow terminal, in this order. ``cut``: a column whose long cells are shortened. If it is
    set and standard output is a terminal, cells of all columns are shortened where needed, to keep each row on one line.
    ``empty``: printed on standard error if there are no rows."""
    body = [[" ".join(cell.split()) if "\n" in cell else cell for cell in row] for row in rows]
    if not body and empty:
        note(empty)
        return []
    if on_terminal():
        screen = console()
        shown, missing = render_table(columns, body, right, drop, screen.width, cut is not None)
        screen.print(shown)
        if missing:
            screen.print(f"too narrow for: {', '.join(missing)}", style="dim")
        return missing
    body = _truncate_column(columns, body, cut)
    widths = [max(len(c), *(len(r[i]) for r in body)) if body else len(c) for i, c in enumerate(columns)]
    for row in [list(columns), *body]:
        cells = (v.rjust(w) if c in right else v.ljust(w) for v, w, c in zip(row, widths, columns, strict=True))
        line("  ".join(cells).rstrip())
    return []


def _truncate_column(columns: Sequence[str], rows: Sequence[Sequence[str]], cut: str | None) -> list[list[str]]:
    """Return a copy of ``rows`` with at most ``_CUT`` characters in the column ``cut``; None: no column is truncated."""

    def short(text: str) -> str:
        """Return ``text`` with at most ``_CUT`` characters; the last one is an ellipsis if text is cut off."""
        return text if len(text) <= _CUT else text[: _CUT - 1].rstrip() + "…"

    return [[short(text) if name == cut else text for name, text in zip(columns, row, strict=True)] for row in rows]


def render_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], drop: Sequence[str], width: int,
    one_line: bool = False,
) -> tuple[Table, list[str]]:  # fmt: skip
    """Return a table for a terminal of ``width`` columns, and the names of the omitted columns. ``one_line``: cells are
    truncated, not wrapped. Other arguments: as for ``table``."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    missing = _columns_to_omit(columns, rows, drop, width)
    # Two spaces between columns, none around: what `_columns_to_omit` counts.
    shown = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        if column not in missing:
            justify: Any = "right" if column in right else "left"
            shown.add_column(column, justify=justify, no_wrap=column in ("ID", "AGE"), overflow="fold")
    for row in rows:
        kept = [value for column, value in zip(columns, row, strict=True) if column not in missing]
        # no_wrap on the text, not on its column: rich shrinks only columns that may be wrapped.
        cells = [Text(v, style=style_of(v), no_wrap=one_line, overflow="ellipsis" if one_line else None) for v in kept]
        shown.add_row(*cells)
    return shown, missing


def _columns_to_omit(
    columns: Sequence[str], rows: Sequence[Sequence[str]], drop: Sequence[str], width: int
) -> list[str]:
    """Return the columns to omit so that the table fits in ``width`` characters, if possible. They are taken from ``drop``, in
    its order. A column that is wider than ``_TEXT`` counts as ``_TEXT`` characters wide."""
    needs = {c: min(max(len(c), *(len(row[i]) for row in rows), 0), _TEXT) for i, c in enumerate(columns)}
    missing: list[str] = []
    for column in drop:
        if sum(needs.values()) + 2 * (len(needs) - 1) <= width:
            break
        if column in needs:
            del needs[column]
            missing.append(column)
    return missing


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of new bytes, which advances a bar on a terminal. ``total``: bytes; ``what``: the
    bar's text."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    parts = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*parts, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=max(1, total))
        yield lambda count: bar.advance(task, count)


def fields(*groups: Iterable[tuple[str, object]]) -> None:
    """Print lines ``name value`` on standard output, with a blank line between groups. None and empty strings are omitted."""
    said = [[(name, str(value)) for name, value in group if value is not None and value != ""] for group in groups]
    shown = [group for group in said if group]
    width = max((len(name) for group in shown for name, _ in group), default=0)
    for group in shown:
        if group is not shown[0]:
            line()
        for name, value in group:
            if on_terminal():
                from rich.text import Text

                console().print(Text.assemble((name.ljust(width) + "  ", "bold"), (value, style_of(value))))
            else:
                line(f"{name.ljust(width)}  {value}")


def age(moment: datetime | None, now: datetime | None = None) -> str:
    """Return how long ago ``moment`` was, in one unit, like ``12s`` or ``3h``; "-" for None."""
    if moment is None:
        return "-"
    seconds = max(0, int(((now or datetime.now(UTC)) - moment).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def span(start: datetime | None, end: datetime | None) -> str:
    """Return the duration from ``start`` to ``end`` (None: now) in the form of ``duration``; "-" if ``start`` is None."""
    return "-" if start is None else duration(max(0.0, ((end or datetime.now(UTC)) - start).total_seconds()))


def duration(seconds: float) -> str:
    """Return a duration as text, like ``4.2s``, ``1m 23s`` or ``5h 02m``."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours = minutes // 60
    return f"{hours}h {minutes % 60:02d}m" if hours < 24 else f"{hours // 24}d {hours % 24:02d}h"


def size(count: int | None) -> str:
    """Return a number of bytes in binary units, like ``1.5 MiB``; "-" for None."""
    if count is None:
        return "-"
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def count(number: int) -> str:
    """Return a number with at most three significant digits, and a unit from 1000: 512, 73.5 k, 1.99 M."""
    value, units = float(number), ["", " k", " M", " G", " T", " P"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g}{units[0]}"


def format_time(value: datetime | None) -> str | None:
    """Return the time as RFC 3339 text in UTC with whole seconds; None for None."""
    return None if value is None else value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def dash(value: object) -> str:
    """Return ``value`` as text; "-" if it is None or an empty string."""
    return "-" if value is None or value == "" else str(value)
