"""The ``Job`` class. The public import path of ``ratchet_client.resources.job``."""

from ratchet_client.resources.job import Job

__all__ = [
    "Job",
]
