"""Pre-flight of a spec's ``tracking``: whether the service has the trackers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ratchet_contract.spec.job import JobSpec
from ratchet_contract.spec.tracking import TrackerName
from ratchet_service.preflight.report import Report

_OPTIONS: Final = {"tensorboard": "--tensorboard-dir", "mlflow": "--mlflow-uri", "wandb": "--wandb-dir"}


def check(spec: JobSpec, trackers: Sequence[TrackerName], report: Report) -> list[TrackerName]:
    """Return the trackers that get the job's metrics. Add to ``report`` those that the service does not have."""
    if spec.tracking.to is None:
        return list(trackers)
    for number, name in enumerate(spec.tracking.to):
        if name not in trackers:
            here = f"it has {', '.join(trackers)}" if trackers else "it has none"
            text = f"this service has no tracker {name}: {here}; the service's option {_OPTIONS[name]} adds it"
            report.refuse(f"/tracking/to/{number}", "tracker-not-here", text)
    return list(dict.fromkeys(spec.tracking.to))
