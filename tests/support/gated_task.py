"""A task that is held before a step for as long as a test says, so that it is not at its end before the test has stopped, killed
or resized it, however late that is."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ENTRYPOINT: Final = "gated:Gated"
"""Of a code directory that ``write_task`` wrote to. Its argument ``gates`` is a directory: a file there named as the step holds
all ranks before it, one named ``<step>.<rank>`` one of them."""
_SOURCE: Final = """
import time
from pathlib import Path

from ratchet_worker.tasks.digits import DigitsTask


class Gated(DigitsTask):
    def __init__(self, gates, **more):
        super().__init__(**more)
        self.gates = Path(gates)

    def build(self, context):
        self.rank = context.rank
        return super().build(context)

    def before_step(self, model, optimizer, step):
        closed = self.gates / str(step), self.gates / f"{step}.{self.rank}"
        while any(gate.exists() for gate in closed):
            time.sleep(0.01)
"""


def write_task(code: Path) -> None:
    """Into a job's code."""
    (code / "gated.py").write_text(_SOURCE)
