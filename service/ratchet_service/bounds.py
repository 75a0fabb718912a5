"""How much of a job's output is kept. What goes beyond is left out or thinned, and told; nothing is averaged."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ratchet_contract.messages import LOG_BYTES


@dataclass(frozen=True)
class Bounds:
    """Sizes are bytes of disk. Raises ``ValueError`` for one that cannot be kept."""

    log_bytes: int = LOG_BYTES  # of one rank in one attempt: its beginning and its end stay
    job_log_bytes: int = 4 << 30  # of all attempts that have ended; then those in the middle lose theirs
    log_attempts: int = 3  # the first so many and the last so many keep theirs
    notes: int = 1000  # events of one attempt that its ranks ask for
    series: int = 1000  # names of metrics of one job
    points: int = 4000  # of one series, thinned to half beyond; and the newest one
    samples: int = 2000  # hook summaries of one rank, likewise

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 1 << 20 if field.name == "log_bytes" else 2 if field.name == "points" else 1
            if getattr(self, field.name) < least:
                raise ValueError(f"{field.name} must be at least {least}, not {getattr(self, field.name)}")


DEFAULT_BOUNDS = Bounds()


def parse_bounds(text: str) -> Bounds:
    """``NAME=NUMBER,...``; what is not named is as ever. Raises ``ValueError``."""
    values: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name not in {field.name for field in fields(Bounds)} or not (number.isascii() and number.isdigit()):
            known = ", ".join(field.name for field in fields(Bounds))
            raise ValueError(f"{part!r} is no bound: NAME=NUMBER with a name of {known}")
        values[name] = int(number)
    return Bounds(**values)
