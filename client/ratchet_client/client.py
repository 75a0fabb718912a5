"""The client of the REST API. The public import path of ``ratchet_client.resources.client``."""

from ratchet_client.resources.client import TERMINAL, Job, RatchetClient, Series, Snapshot, WhichAttempt

__all__ = ["TERMINAL", "Job", "RatchetClient", "Series", "Snapshot", "WhichAttempt"]
