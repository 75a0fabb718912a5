"""Findings of ``ratchet doctor``, in one form for the client, the service and the worker."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

Status = Literal["ok", "warning", "failed", "not-checked"]


class Finding(BaseModel):
    """The result of one check of ``ratchet doctor``. ``value``: the figure or fact found; ``detail``: what it means; ``cure``:
    what to do, always set unless ``status`` is ``ok``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    status: Status
    value: str
    detail: str | None = None
    cure: str | None = None

    @model_validator(mode="after")
    def _require_cure(self) -> Self:
        """Raise ``ValueError`` if a finding that is not ``ok`` has no cure."""
        if self.status != "ok" and not self.cure:
            raise ValueError(f"the finding {self.name!r} is {self.status} and needs a cure")
        return self


def ok(name: str, value: str, detail: str | None = None) -> Finding:
    return Finding(name=name, status="ok", value=value, detail=detail)


def warning(name: str, value: str, *, cure: str, detail: str | None = None) -> Finding:
    """Return a finding with status ``warning``: Ratchet can run, but with a flaw, such as less speed, safety or exactness."""
    return Finding(name=name, status="warning", value=value, detail=detail, cure=cure)


def failed(name: str, value: str, *, cure: str, detail: str | None = None) -> Finding:
    """Return a finding with status ``failed``: Ratchet cannot run, or not as documented."""
    return Finding(name=name, status="failed", value=value, detail=detail, cure=cure)


def not_checked(name: str, value: str, *, cure: str, detail: str | None = None) -> Finding:
    """Return a finding with status ``not-checked``: the check was not possible. ``cure`` states what would make it possible."""
    return Finding(name=name, status="not-checked", value=value, detail=detail, cure=cure)


class ProbeReport(BaseModel):
    """What ``python -m ratchet_worker.doctor`` and ``python -m ratchet_service.doctor`` print, as one JSON document.

    ``cpu``: the processor's name. ``gpus``: names of the CUDA devices that torch can use, by index.
    """

    model_config = ConfigDict(extra="forbid")

    findings: list[Finding]
    cpu: str | None = None
    gpus: list[str] = []
