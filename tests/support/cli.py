"""Running the executable ``ratchet`` as a user would: a process of its own, its streams and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXECUTABLE = Path(sys.executable).with_name("ratchet")


@dataclass(frozen=True)
class Result:
    code: int
    text: str
    errors: str

    @property
    def data(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.text)


class Cli:
    """``cli("get", id)`` runs ``ratchet get ID`` with the run directory ``home`` in the directory ``cwd``."""

    def __init__(self, home: Path, cwd: Path) -> None:
        self.cwd = cwd
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("RATCHET_")}
        self.environment |= {"RATCHET_HOME": str(home), "RATCHET_CONFIG": str(cwd / "ratchet.json"), "COLUMNS": "200"}

    def command(self, *arguments: str) -> list[str]:
        return [str(EXECUTABLE), *arguments]

    def __call__(self, *arguments: str, expect: int = 0, stdin: str = "", deadline: float = 60.0) -> Result:
        done = subprocess.run(
            self.command(*arguments), cwd=self.cwd, env=self.environment, input=stdin, capture_output=True, text=True,
            timeout=deadline,
        )  # fmt: skip
        result = Result(done.returncode, done.stdout, done.stderr)
        assert result.code == expect, f"{arguments}: {result}"
        return result
