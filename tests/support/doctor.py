"""``ratchet doctor`` as a user runs it, and the machines that it is to complain about."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.cli import Cli, Result
from tests.support.import_hooks import after_import

NO_PYTHON = "/bin/false"
"""An interpreter that answers nothing, at once: for tests that are not about torch. The doctor then ends with 8."""

MISSING_TORCH = 'raise ModuleNotFoundError("No module named \'torch\'", name="torch")\n'
OLD_TORCH = '__version__ = "2.8.1+cpu"\n'
NOTHING_TESTED = "from ratchet_hooks import torch_versions\ntorch_versions.TESTED = ()\n"
"""Of the module sitecustomize: no test of Ratchet runs on the torch that is there."""
BROKEN_TORCH = 'raise OSError("libtorch_cpu.so: cannot open shared object file")\n'

FORGETS_RESIDUALS = after_import(
    "ratchet_hooks.algorithms.powersgd.low_rank",
    """
restore = module.LowRank.restore
def forgetful(hook, tensors, *rest):
    lost = os.environ["RANK"] == "1"  # looked up here: a rank may be forked from where this was imported
    kept = {k: t * 0 if lost and k.startswith("residual/") else t for k, t in tensors.items()}
    return restore(hook, kept, *rest)
module.LowRank.restore = forgetful
""",
)
"""In rank 1 of a job: what PowerSGD has put off until later is forgotten when a checkpoint is restored."""


class Doctor:
    """``doctor("--json")`` in the directory ``cwd``, with ``environment`` to change."""

    def __init__(self, home: Path, cwd: Path) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        self.cli = Cli(home, cwd)
        self.environment = self.cli.environment

    def __call__(self, *arguments: str, expect: int = 0, deadline: float = 60.0) -> Result:
        result = self.cli("doctor", *arguments, expect=expect, deadline=deadline)
        assert "Traceback" not in result.text + result.errors
        return result

    def rows(self, *arguments: str, expect: int = 8, python: str | None = NO_PYTHON) -> dict[str, dict[str, Any]]:
        """The findings by name."""
        chosen = () if python is None else ("--python", python)
        return by_name(self("--json", *chosen, *arguments, expect=expect))


def by_name(result: Result) -> dict[str, dict[str, Any]]:
    for row in result.data:
        assert set(row) == {"name", "status", "value", "detail", "cure"}
        assert row["status"] in ("ok", "warning", "failed", "not-checked") and row["value"]
        assert row["status"] == "ok" or row["cure"], row
    return {row["name"]: row for row in result.data}


def file_digests(folder: Path) -> dict[str, str]:
    """Every file below ``folder`` with its digest, every directory with none."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in sorted(folder.rglob("*"))
    }


@contextmanager
def fake_service(*, ahead: float = 0.0, version: str = "0.1.0", ready: int = 200) -> Iterator[str]:
    """The URL of something that answers as a service would whose clock is ``ahead`` seconds fast."""
    import time

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(ready if self.path == "/readyz" else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"status": "ok", "version": "%s"}' % version.encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + ahead, usegmt=True)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
