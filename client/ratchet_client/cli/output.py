"""What the commands print: rich on a terminal, plain aligned text elsewhere (no colour codes, no wrapping), JSON when asked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

_STYLES = {
    "RUNNING": "cyan", "STARTING": "cyan", "STOPPING": "yellow", "QUEUED": "yellow", "SUSPENDED": "magenta",
    "SUCCEEDED": "green", "succeeded": "green", "exact": "green", "ok": "green", "committed": "green", "LAUNCHING": "cyan",
    "FAILED": "bold red", "failed": "red", "lost": "red", "damaged": "bold red", "quarantined": "red", "not-exact": "bold red",
    "CANCELLED": "dim", "ENDED": "dim", "deleted": "dim", "preempted": "yellow",
}  # fmt: skip


def on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def style_of(word: str) -> str:
    return _STYLES.get(word, "")


def line(text: str = "") -> None:
    """One line of output, unchanged: no markup, no wrapping."""
    sys.stdout.write(text + "\n")


def flush() -> None:
    sys.stdout.flush()


def note(text: str) -> None:
    """For people, on stderr: never part of what a script reads."""
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def emit(data: BaseModel | Sequence[BaseModel]) -> None:
    """One JSON document."""
    line(json.dumps(_plain(data), indent=2, ensure_ascii=False))


def emit_line(data: BaseModel | dict[str, Any]) -> None:
    """One line of JSON lines, written at once."""
    line(json.dumps(_plain(data), separators=(",", ":"), ensure_ascii=False))
    sys.stdout.flush()


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _plain(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(item) for item in data]
    # Not model_dump: only the JSON form writes numbers that are not finite as strings, as the API does.
    return json.loads(data.model_dump_json()) if hasattr(data, "model_dump_json") else data


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), empty: str = "") -> None:
    """A table with a header; the columns named in ``right`` are numbers. ``empty`` is said on stderr when there is no row."""
    body = [list(row) for row in rows]
    if not body and empty:
        note(empty)
    if on_terminal():
        _rich_table(columns, body, right)
        return
    widths = [max(len(c), *(len(r[i]) for r in body)) if body else len(c) for i, c in enumerate(columns)]
    for row in [list(columns), *body]:
        cells = (v.rjust(w) if c in right else v.ljust(w) for v, w, c in zip(row, widths, columns, strict=True))
        line("  ".join(cells).rstrip())


def _rich_table(columns: Sequence[str], rows: list[list[str]], right: Sequence[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(
            column, justify="right" if column in right else "left", no_wrap=column == "ID", overflow="fold"
        )
    for row in rows:
        shown.add_row(*(Text(value, style=style_of(value)) for value in row))
    console().print(shown)


def fields(pairs: Iterable[tuple[str, object]]) -> None:
    """``name  value`` lines; None and empty values are left out."""
    shown = [(name, str(value)) for name, value in pairs if value is not None and value != ""]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        if on_terminal():
            from rich.text import Text

            console().print(Text.assemble((name.ljust(width) + "  ", "bold"), (value, style_of(value))))
        else:
            line(f"{name.ljust(width)}  {value}")


def age(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago, in one unit: 12s, 5m, 3h, 2d."""
    if moment is None:
        return "-"
    seconds = max(0, int(((now or datetime.now(UTC)) - moment).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def span(start: datetime | None, end: datetime | None) -> str:
    """A duration as 1m 23s; ``-`` before the start."""
    if start is None:
        return "-"
    seconds = max(0.0, ((end or datetime.now(UTC)) - start).total_seconds())
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def size(count: int | None) -> str:
    """Bytes in binary units."""
    if count is None:
        return "-"
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def moment(value: datetime | None) -> str | None:
    """RFC 3339, UTC, whole seconds."""
    return None if value is None else value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def dash(value: object) -> str:
    return "-" if value is None or value == "" else str(value)
