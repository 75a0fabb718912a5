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
    count: int = Field(1, ge=1, le=1000, description="How many.")


class CheckpointSpec(SpecModel):
    every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        100,
        description="Steps between scheduled checkpoints. auto: as many as `max_overhead` allows, by the measured durations "
        "of saves and steps; null: none by steps. With `every_seconds` it is null unless set; with both, the earlier one "
        "counts.",
    )
    every_seconds: Seconds | None = Field(None, description="Time between scheduled checkpoints; null: none by time.")
    first: Annotated[int, Field(ge=1)] | Literal["auto", "off"] = Field(
        "auto",
        description="A save before the first scheduled one, while the job has no checkpoint. auto: after the first step if "
        "it is expected to take less than 2 s, else after training for 20 times its expected duration; a number: after "
        "that step; off: none. It does not shift scheduled ones, and is deleted when two others exist.",
    )
    max_overhead: float = Field(
        0.03, gt=0, le=0.5, description="With every_steps auto: the share of the training time that saves may cost."
    )
    staging: Literal["auto", "overlapped", "blocking"] = Field(
        "auto",
        description="overlapped: the state is copied while the next step computes, parameters and optimizer before its "
        "optimizer.step(); blocking: before the next step. auto: overlapped for a task, blocking for a script, whose code may "
        "change parameters at any time. In both, writing continues concurrently with training.",
    )
    when_busy: Literal["wait", "skip"] = Field(
        "wait",
        description="What to do if a checkpoint is due while the previous one is still being written. wait: training waits, "
        "so none is skipped; skip: it is skipped, and an event reports it.",
    )
    keep_last: int = Field(
        3,
        ge=2,
        le=10_000,
        description="Newest checkpoints kept; never fewer than two. Those of earlier attempts stay until the running one ends.",
    )
    keep_every: int | None = Field(
        None, ge=1, description="Checkpoints of steps that are multiples of this are kept for good; null: none."
    )
    keep_best: BestSpec | None = Field(None, description="Also keep the checkpoints with the best values of a metric.")
    uri: str | None = Field(
        None,
        max_length=1000,
        description="s3://BUCKET/PREFIX, gs:// or az://CONTAINER/PREFIX: every checkpoint is copied there in the background, "
        "and fetched from there if the local disk has none. Credentials come from the environment.",
    )

    ignore: dict[str, str] = Field(
        {},
        max_length=100,
        description="Attributes and variables that training does not depend on, by path as a resume report names it, each with "
        'the reason: {"model.history": "a log"}. They are neither saved nor reported, and every resume report says so.',
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
        """Convert and check ``every_steps``. The error is one clear message; pydantic's union would report an error for each
        of its members."""
        if value is None or value == "auto":
            return value
        if (steps := _positive_int(value)) is not None:
            return steps
        raise ValueError(f"must be a whole number of steps (1 or more), auto or null, not {str(value)[:80]!r}")

    @field_validator("first", mode="before")
    @classmethod
    def _first(cls, value: Any) -> Any:
        """Convert and check ``first``; False counts as ``off``, since YAML parses a bare off as False."""
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
        """Check the URI and remove a ``/`` at its end."""
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
