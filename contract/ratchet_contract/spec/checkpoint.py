"""The ``checkpoint`` part of a spec: when to save, what to keep, and where to copy it."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ratchet_contract.spec.types import Seconds, SpecModel

SCHEMES = ("s3", "gs", "az")


class BestSpec(SpecModel):
    """Checkpoints with the best values of a metric, kept in addition to the newest."""

    metric: str = Field(min_length=1, max_length=200, description="Name of a metric that the job logs.")
    mode: Literal["min", "max"] = Field("min", description="Whether the smallest or the largest value is the best.")
    count: int = Field(1, ge=1, le=1000, description="How many of these checkpoints are kept.")


class CheckpointSpec(SpecModel):
    every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        100,
        description="Steps between scheduled checkpoints. auto: Ratchet computes the interval from `max_overhead` and "
        "the measured durations of saves and steps. null: no checkpoints by steps. If only `every_seconds` is set, "
        "this key is null. If both are set, each of them causes checkpoints.",
    )
    every_seconds: Seconds | None = Field(
        None, description="Time between scheduled checkpoints; null: no checkpoints by time."
    )
    memory_every_steps: int | None = Field(
        None,
        ge=1,
        description="Steps between copies of the state in memory, which the agent holds: if ranks end early and the agent "
        "lives, it writes the newest copy to the disk as a checkpoint. Takes twice the size of a checkpoint in memory. "
        "Only for one node. null: no copies.",
    )
    first: Annotated[int, Field(ge=1)] | Literal["auto", "off"] = Field(
        "auto",
        description="An extra save before the first scheduled one, if the job has no checkpoint yet. auto: after the "
        "first step if the save is expected to take less than 2 s, else after training for 20 times the save's "
        "expected duration. A number: after that step. off: no extra save. The extra save does not shift scheduled "
        "saves, and is deleted when two other checkpoints exist.",
    )
    max_overhead: float = Field(
        0.03, gt=0, le=0.5, description="With every_steps auto: the share of the training time that saves may cost."
    )
    staging: Literal["auto", "overlapped", "blocking"] = Field(
        "auto",
        description="When a save copies the state. overlapped: during the next step; parameters and optimizer are "
        "copied before that step's optimizer.step(). blocking: before the next step. auto: overlapped for "
        "a task; blocking for a script, since a script's code may change parameters at any time. In all "
        "cases the copy is written while training continues.",
    )
    when_busy: Literal["wait", "skip"] = Field(
        "wait",
        description="What to do if a checkpoint is due while the previous one is still being written. wait: training "
        "waits for the previous one. skip: the due checkpoint is skipped, and an event reports this.",
    )
    keep_last: int = Field(
        3,
        ge=2,
        le=10_000,
        description="Number of newest checkpoints that are kept. Checkpoints of earlier attempts stay until the "
        "running attempt ends.",
    )
    keep_every: int | None = Field(
        None,
        ge=1,
        description="A checkpoint whose step is a multiple of this number is kept for good. null: no such checkpoints.",
    )
    keep_best: BestSpec | None = Field(None, description="Also keep the checkpoints with the best values of a metric.")
    uri: str | None = Field(
        None,
        max_length=1000,
        description="Object store: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX. Every checkpoint "
        "is copied there in the background. If the local disk has lost a checkpoint, it is fetched from there. "
        "Credentials come from the environment of service and agents.",
    )

    ignore: dict[str, str] = Field(
        {},
        max_length=100,
        description="Attributes and variables on which training does not depend. Each key is a path, as in a resume "
        'report; its value is the reason: {"model.history": "a log"}. They are not saved, and do not count as '
        "missing; every resume report lists them as ignored.",
    )

    @model_validator(mode="before")
    @classmethod
    def _by_time_alone(cls, data: Any) -> Any:
        """Set ``every_steps`` to None if only ``every_seconds`` is given."""
        if isinstance(data, dict) and data.get("every_seconds") is not None and "every_steps" not in data:
            return {**data, "every_steps": None}
        return data

    @field_validator("every_steps", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> Any:
        """Return ``every_steps`` as a number, "auto" or None. Raises ``ValueError`` for any other value."""
        if value is None or value == "auto":
            return value
        if (steps := _positive_int(value)) is not None:
            return steps
        # pydantic's union would report an error for each of its members.
        raise ValueError(f"must be a whole number of steps (1 or more), auto or null, not {str(value)[:80]!r}")

    @field_validator("first", mode="before")
    @classmethod
    def _first(cls, value: Any) -> Any:
        """Return ``first`` as a number, "auto" or "off"; False means "off". Raises ``ValueError`` for any other value."""
        if value is False:  # YAML parses a bare off as False
            return "off"
        if value in ("auto", "off"):
            return value
        if (step := _positive_int(value)) is not None:
            return step
        raise ValueError(f"must be the number of a step (1 or more), auto or off, not {str(value)[:80]!r}")

    @field_validator("uri")
    @classmethod
    def _uri(cls, value: str | None) -> str | None:
        """Return the URI without a ``/`` at its end. Raises ``ValueError`` if it is malformed or has credentials or options."""
        if value is None:
            return None
        scheme, separator, rest = value.partition("://")
        parts = rest.rstrip("/").split("/")
        if not separator or scheme not in SCHEMES or not parts[0] or any(p in ("", ".", "..") for p in parts):
            raise ValueError(f"a uri is {', '.join(f'{s}://BUCKET/PREFIX' for s in SCHEMES)}, not {value[:80]!r}")
        if "@" in parts[0] or "?" in rest or "#" in rest or not rest.isprintable():
            raise ValueError("credentials and options come from the environment, never in a uri")
        return value.rstrip("/")


def _positive_int(value: Any) -> int | None:
    """Return a whole number of at least 1, given as a number or as text; None for any other value."""
    if not isinstance(value, bool):
        with suppress(ValueError, TypeError, OverflowError):
            if (number := int(value)) == float(value) and number >= 1:
                return number
    return None
