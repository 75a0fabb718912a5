"""Settings that a service gets at start."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Literal

from ratchet_contract.paths import HomePaths
from ratchet_contract.spec.tracking import TrackerName
from ratchet_service.config.output_limits import DEFAULT_BOUNDS, Bounds
from ratchet_service.config.standby_bounds import ON, StandbyBounds
from ratchet_service.db.engine import sqlite_url
from ratchet_service.isolation.sandbox import NO_LIMITS, Limits, Sandbox, User

Network = IPv4Network | IPv6Network


@dataclass(frozen=True)
class Settings:
    """Settings of a service. Sizes are bytes, times seconds. ``home``: the run directory. ``database_url``: None for a SQLite
    file in the run directory."""

    home: Path
    database_url: str | None = None
    launchers_file: Path | None = None  # None: only the local launcher
    user: User | None = None  # as which users' code runs; None: the service's own user
    user_limits: Limits = NO_LIMITS  # on everything that runs as that user
    tokens_required: bool = False  # required of every caller; ``serve`` decides, by where it listens
    code_roots: tuple[Path, ...] | None = None  # directories of the service that a spec may name; None: any
    uri_roots: tuple[str, ...] | None = None  # prefixes of ``checkpoint.uri`` that a spec may name; None: any
    webhook_networks: tuple[Network, ...] = ()  # not public, but allowed for webhooks
    tensorboard_dir: Path | None = None  # these three: trackers that get jobs' metrics; None: not that one
    mlflow_uri: str | None = None
    wandb_dir: Path | None = None
    wandb_mode: Literal["offline", "online"] = "offline"
    request_rate: float = 100.0  # requests per second of one caller
    request_burst: int = 1000  # requests of one caller at once
    report_rate: float = 100.0  # per second and node of an attempt; its agent reports about three times a second
    report_burst: int = 1000
    refused_rate: float = 1.0  # requests per second with invalid tokens, from one address
    refused_burst: int = 60
    max_body_bytes: int = 1 << 20
    max_report_body_bytes: int = 16 << 20
    idempotency_seconds: float = 24 * 3600.0
    claim_seconds: float = 300.0  # an idempotent request without an answer by then has died with its server
    follow_interval: float = 0.25  # between two polls while following events or logs
    keep_alive_interval: float = 15.0  # between comment lines, by which dead followers are noticed
    standby: StandbyBounds = ON  # of agents that the local launcher parks
    bounds: Bounds = DEFAULT_BOUNDS  # how much of a job's output is kept
    max_exports: int = 2  # concurrent; each is a process with torch
    export_seconds: float = 1800.0  # for one export; less than the client waits for the first byte
    export_send_seconds: float = 300.0  # for a client to accept a MiB of an export
    max_file_transfers: int = 8  # concurrent downloads of files and archives of jobs' working directories
    file_send_seconds: float = 60.0  # for a client to accept a MiB of a download, which holds one of these slots
    paths: HomePaths = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", HomePaths(self.home.resolve()))

    @property
    def trackers(self) -> tuple[TrackerName, ...]:
        """The trackers that the service has."""
        found: dict[TrackerName, object] = {
            "tensorboard": self.tensorboard_dir,
            "mlflow": self.mlflow_uri,
            "wandb": self.wandb_dir,
        }
        return tuple(name for name, value in found.items() if value is not None)

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox in which users' code is started: the user ``user`` and the limits ``user_limits``."""
        return Sandbox(self.user, self.user_limits)

    @property
    def url(self) -> str:
        """The URL of the database: ``database_url``, or that of SQLite in the run directory."""
        return self.database_url or sqlite_url(self.paths.database)
