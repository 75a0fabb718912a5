"""The task ``digits`` with a pause in each step: a long job that leaves the processors to what looks at it."""

from __future__ import annotations

ENTRYPOINT = "paced:Paced"
FILE = "paced.py"


def source(seconds: float) -> str:
    """Return the text of ``FILE``, a job's code. ``seconds``: the pause in each step."""
    return f"""
import time
from ratchet_worker.tasks.digits import DigitsTask

class Paced(DigitsTask):
    def loss(self, model, batch):
        time.sleep({seconds})
        return super().loss(model, batch)
"""
