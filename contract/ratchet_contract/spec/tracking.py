"""The ``tracking`` part of a spec: which experiment trackers get the job's metrics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ratchet_contract.spec.types import SpecModel

TrackerName = Literal["tensorboard", "mlflow", "wandb"]


class TrackingSpec(SpecModel):
    to: list[TrackerName] | None = Field(
        None,
        max_length=3,
        description="The trackers, which the service must have. null: all that the service has. []: none.",
    )
    publish: Literal["settled", "live"] = Field(
        "settled",
        description="settled: a value is sent when a checkpoint of its step or of a later one is committed, or when the job "
        "ends. live: it is sent at once.",
    )
    experiment: str = Field(
        "ratchet",
        pattern=r"^[A-Za-z0-9][-A-Za-z0-9_. ]{0,62}$",
        description="The experiment of MLflow, the project of W&B, the directory of TensorBoard that the run belongs to.",
    )
