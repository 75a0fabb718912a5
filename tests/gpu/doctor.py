"""Row ``doctor``: ``ratchet doctor --exactness`` as a user calls it. On a machine with a GPU it proves hooks on CPU and GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

from tests.gpu.runner import ROOT
from tests.gpu.work import Work

_RATCHET: Final = "from ratchet_client.cli import main; main()"


def run(work: Work) -> str:
    hooks = ["powerSGD"] if work.size == "cheap" else ["powerSGD", "post_localSGD"]
    command = [sys.executable, "-c", _RATCHET, "doctor", "--exactness", "--json", "--home", str(work.folder / "home")]
    command += [word for hook in hooks for word in ("--hook", hook)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=work.left - 2)
    found: list[dict[str, Any]] = json.loads(done.stdout or "[]")
    for finding in found:
        words = " ".join(filter(None, [finding["value"], finding.get("detail"), finding.get("cure")]))
        if finding["status"] == "failed":
            work.red(finding["name"], words)
        elif finding["name"].startswith("exactness"):
            work.green(finding["name"], words)
    wanted = {f"exactness {hook} {work.device}" for hook in hooks}
    for name in sorted(wanted - {finding["name"] for finding in found}):
        work.red(name, f"doctor did not prove it: exit code {done.returncode}: {done.stderr[-600:]}")
    if done.returncode and not any(finding["status"] == "failed" for finding in found):
        raise RuntimeError(f"doctor ended with {done.returncode}: {done.stderr[-600:]}")
    others = [
        f"{finding['name']} ({finding['status']})" for finding in found if finding["status"] not in ("ok", "failed")
    ]
    return f"{len(found)} checks; not ok: {', '.join(others) or 'none'}"
