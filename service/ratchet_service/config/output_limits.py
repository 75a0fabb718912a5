"""Limits on how much of a job's output is kept; the rest is left out or thinned."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ratchet_contract.protocol.messages import LOG_BYTES


@dataclass(frozen=True)
class Bounds:
    """Limits on how much of a job's output is kept. Sizes are bytes on the disk. Raises ``ValueError`` for one that is too
    small."""

    log_bytes: int = LOG_BYTES  # of one rank in one attempt; its beginning and its end are kept
    job_log_bytes: int = 4 << 30  # of all ended attempts; beyond it, logs of attempts in the middle are shortened
    log_attempts: int = 3  # the first N and the last N attempts keep their logs
    notes: int = 1000  # events of one attempt that its ranks request
    series: int = 1000  # metric names of one job
    points: int = 4000  # of one series, plus the newest; beyond it, thinned to half
    samples: int = 2000  # hook summaries of one rank; beyond it, thinned to half

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 1 << 20 if field.name == "log_bytes" else 2 if field.name == "points" else 1
            if getattr(self, field.name) < least:
                raise ValueError(f"{field.name} must be at least {least}, not {getattr(self, field.name)}")


DEFAULT_BOUNDS = Bounds()


def parse_bounds(text: str) -> Bounds:
    """Return the limits in the text ``NAME=NUMBER,...``; a limit that is not named keeps its default. Raises ``ValueError``."""
    values: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name not in {field.name for field in fields(Bounds)} or not (number.isascii() and number.isdigit()):
            known = ", ".join(field.name for field in fields(Bounds))
            raise ValueError(f"{part!r} is not a limit: use NAME=NUMBER with one of the names {known}")
        values[name] = int(number)
    return Bounds(**values)
