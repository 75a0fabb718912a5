"""What a running service is told at start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ratchet_contract.paths import HomePaths
from ratchet_service.bounds import DEFAULT_BOUNDS, Bounds
from ratchet_service.confined import NO_LIMITS, Confined, Limits, User
from ratchet_service.database import sqlite_url


@dataclass(frozen=True)
class Settings:
    """Sizes are bytes, times seconds. ``database_url`` None: SQLite below ``home``."""

    home: Path
    database_url: str | None = None
    launchers_file: Path | None = None  # None: the local launcher alone
    user: User | None = None  # that users' code runs as; None: the service's own
    user_limits: Limits = NO_LIMITS  # what all that runs as that user may take
    tokens: bool = False  # demanded of every caller; ``serve`` decides, by where it listens
    code_roots: tuple[Path, ...] | None = None  # directories of the service that a spec may name; None: any
    uri_roots: tuple[str, ...] | None = None  # the same of ``checkpoint.uri``
    request_rate: float = 100.0  # requests a second of one caller
    request_burst: int = 1000  # of these at once
    report_rate: float = 100.0  # the same of each node of an attempt: its agent reports some three times a second
    report_burst: int = 1000
    refused_rate: float = 1.0  # of tokens that are not ours, from one address
    refused_burst: int = 60
    max_body: int = 1 << 20
    max_report_body: int = 16 << 20
    idempotency_seconds: float = 24 * 3600.0
    claim_seconds: float = 300.0  # an idempotent request that has not answered by then has died with its server
    follow_interval: float = 0.25  # between two looks of a follower of events or logs
    keep_alive_interval: float = 15.0  # a comment line, so that dead followers are noticed
    bounds: Bounds = DEFAULT_BOUNDS  # how much of a job's output is kept
    exports: int = 2  # made at one time: each is a process with torch
    export_seconds: float = 1800.0  # for one; below what the client waits for the first byte
    export_send_seconds: float = 300.0  # for a client to take a MiB of one
    file_transfers: int = 8  # files and archives of jobs' working directories that are sent at one time
    file_send_seconds: float = 60.0  # for a client to take a MiB of one: it holds one of these
    paths: HomePaths = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", HomePaths(self.home.resolve()))

    @property
    def confined(self) -> Confined:
        """How users' code is started."""
        return Confined(self.user, self.user_limits)

    @property
    def url(self) -> str:
        return self.database_url or sqlite_url(self.paths.database)
