"""``resources.memory`` and ``open_files``: a rank's code meets them and cannot lift them; what cannot be kept is refused."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.phases import Cause
from ratchet_contract.spec.parse import parse_spec
from ratchet_service.config.settings import Settings
from ratchet_service.launchers.registry import load
from tests.support.api import spec
from tests.support.launch import Job

SCRIPT = """
import resource, subprocess, sys
files = []
try:
    while True:
        files.append(open("/dev/null"))
except OSError as error:
    print("refused", error.errno, 100 < len(files) < 300)
files.clear()
for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_DATA):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("lifted")
    except (ValueError, OSError):
        print("kept", resource.getrlimit(kind))
child = "import resource; print('child', resource.getrlimit(resource.RLIMIT_NOFILE))"
subprocess.run([sys.executable, "-c", child], check=True)
try:
    bytearray(2 << 30)
    print("got it")
except MemoryError:
    print("no memory")
"""


def test_rank_and_child_processes_are_bound_by_resource_limits(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "s.py").write_text(SCRIPT)
    job = Job(
        tmp_path / "home",
        {
            "script": ["s.py"],
            "code": {"path": str(tmp_path / "code")},
            "world": {"ranks_per_node": 1, "device": "cpu"},
            "resources": {"open_files": 256, "memory": "1Gi"},
        },
        tmp_path / "code",
    )
    try:
        result = job.launch().wait()
        log = job.attempts[0].logs()
        assert result.cause is Cause.COMPLETED, log
    finally:
        job.close()
    assert "refused 24 True" in log
    assert "child (256, 256)" in log and "no memory" in log and "got it" not in log
    if os.geteuid() != 0:  # root may lift its own limits
        assert "kept (256, 256)" in log and f"kept ({2**30}, {2**30})" in log and "lifted" not in log


@pytest.mark.parametrize("allocation", ["bytearray(4 << 30)", "torch.empty(4 << 30, dtype=torch.uint8)"])
def test_rank_beyond_its_memory_limit_ends_with_oom(tmp_path: Path, allocation: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "s.py").write_text(f"import torch\n{allocation}\n")
    world, code = {"ranks_per_node": 1, "device": "cpu"}, {"path": str(tmp_path / "code")}
    spec = {"script": ["s.py"], "code": code, "world": world, "resources": {"memory": "1Gi"}}
    job = Job(tmp_path / "home", spec, tmp_path / "code")
    try:
        result = job.launch().wait()
    finally:
        job.close()
    assert result.cause is Cause.OOM and "out of memory: " in (result.message or ""), job.attempts[0].logs()


@pytest.mark.parametrize(
    ("resources", "device", "refused", "warned"),
    [
        ({"memory": "2Gi"}, "cpu", [], ["/resources/memory"]),
        ({"memory": "2Gi"}, "cuda", ["launcher-cannot"], []),
        ({"memory": "2Gi"}, "auto", ["launcher-cannot"], []),
        ({"memory": "512Mi"}, "cpu", ["limit-too-low"], []),
        ({"open_files": 4096}, "auto", [], []),
        ({"open_files": 1_048_576}, "auto", ["limit-too-high"], []),
    ],
)
def test_unsatisfiable_resource_limits_are_refused_at_submission(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resources: dict[str, Any],
    device: str,
    refused: list[str],
    warned: list[str],
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1024, 20_000))
    launcher = load(Settings(tmp_path).paths, None)["local"]
    warnings, problems = launcher.check(
        parse_spec(spec(resources=resources, world={"ranks_per_node": 2, "device": device}))
    )
    assert [problem.code for problem in problems] == refused
    if not refused:
        assert [warning.pointer for warning in warnings] == warned


def test_resource_limits_do_not_change_the_spec_digest() -> None:
    plain, bounded = parse_spec(spec()), parse_spec(spec(resources={"open_files": 512, "memory": "4Gi"}))
    assert plain.digest() == bounded.digest()
