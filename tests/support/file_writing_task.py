"""A task whose ranks each leave a file in their current directory, wherever an engine runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.support.server import Server

ENTRYPOINT: Final = "noted:Noted"
_SOURCE: Final = """
from pathlib import Path

from {module} import {task}


class Noted({task}):
    def build(self, context):
        Path(f"rank-{{context.rank}}.txt").write_text(str(context.rank))
        return super().build(context)
"""


def write_task(code: Path, module: str = "ratchet_worker.tasks.digits", task: str = "DigitsTask") -> None:
    """Into a job's code: ``task`` of ``module``, with these files."""
    (code / "noted.py").write_text(_SOURCE.format(module=module, task=task))


def fetch_note_files(server: Server, job_id: str) -> dict[str, str]:
    """What the service has of them, by path: all files of the job."""
    place = f"/v1/jobs/{job_id}/files"
    found = [file["path"] for file in server.call("GET", place).json()["items"]]
    return {path: server.call("GET", f"{place}/content?path={path}").text for path in found}
