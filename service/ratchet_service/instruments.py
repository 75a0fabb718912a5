"""Prometheus metrics of one app; a registry of its own, so that two apps in one process do not mix."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ratchet_contract.phases import JobPhase
from ratchet_service.database import Database
from ratchet_service.models import Job

_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Instruments:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ["method", "route", "status"]
        self._requests = Counter("ratchet_http_requests", "Answers given.", labels, registry=self._registry)
        self._seconds = Histogram(
            "ratchet_http_request_seconds",
            "Seconds until the answer's first byte.",
            ["method", "route"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._jobs = Gauge("ratchet_jobs", "Jobs by phase.", ["phase"], registry=self._registry)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """``route`` is the template, never the path: ids must not become label values."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def render(self, database: Database) -> bytes:
        """The text format; jobs are counted now."""
        with database.read() as session:
            rows = session.execute(sa.select(Job.phase, sa.func.count()).group_by(Job.phase))
            counted = {phase: number for phase, number in rows.all()}  # noqa: C416
        for phase in JobPhase:
            self._jobs.labels(phase.value).set(counted.get(phase, 0))
        return generate_latest(self._registry)
