"""What ``ratchet doctor`` finds: rows of one shape from the client, the service and the worker; each looks at its own part."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

Status = Literal["ok", "warning", "failed", "not-checked"]


class Finding(BaseModel):
    """One check. ``value``: the figure or fact found; ``detail``: what it means; ``cure``: what to do, always there unless ok."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    status: Status
    value: str
    detail: str | None = None
    cure: str | None = None

    @model_validator(mode="after")
    def _a_complaint_names_its_cure(self) -> Self:
        if self.status != "ok" and not self.cure:
            raise ValueError(f"the finding {self.name!r} is {self.status} and needs a cure")
        return self


def ok(name: str, value: str, detail: str | None = None) -> Finding:
    return Finding(name=name, status="ok", value=value, detail=detail)


def warning(name: str, value: str, *, cure: str, detail: str | None = None) -> Finding:
    """A job will run, but slower, less safely or less exactly than it could."""
    return Finding(name=name, status="warning", value=value, detail=detail, cure=cure)


def failed(name: str, value: str, *, cure: str, detail: str | None = None) -> Finding:
    """Ratchet cannot run, or not as promised."""
    return Finding(name=name, status="failed", value=value, detail=detail, cure=cure)


def not_checked(name: str, value: str, *, cure: str, detail: str | None = None) -> Finding:
    """It could not be found out; ``cure`` says what would let it."""
    return Finding(name=name, status="not-checked", value=value, detail=detail, cure=cure)


class ProbeReport(BaseModel):
    """What ``python -m ratchet_worker.doctor`` and ``python -m ratchet_service.doctor`` print, as one JSON document.

    ``cpu``: the processor's name. ``gpus``: names of the CUDA devices that torch can use, by index.
    """

    model_config = ConfigDict(extra="forbid")

    findings: list[Finding]
    cpu: str | None = None
    gpus: list[str] = []
