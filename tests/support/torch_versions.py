"""The tests that depend on torch, on a version of torch of one's choice: ``python -m tests.support.torch_versions 2.11.0``.

The version (``oldest``, ``newest`` or a number) gets an environment of its own, ``.venv-torch/VERSION-pyX.Y``; the default one
is left alone. ``--python`` names the interpreter, which is looked for on PATH and below ``~/.pyenv/versions``. What follows
``--`` is given to pytest. The last line of the output counts what passed. Exit code: 0 when everything passed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from ratchet_hooks.torch_versions import OLDEST

ROOT = Path(__file__).parents[2]
EXTRAS = "worker,service,postgres,lightning,accelerate,transformers"
TOOLS = ("pytest>=8.4", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "hypothesis>=6.140", "schedulefree>=1.4")
# The first takes longest.
SELECTION = {
    "a killed job of each hook, through the service": ("e2e/test_exactness.py",),
    "what takes the place of a missing part of torch, and how the installed one behaves": (
        "unit/hooks/test_torch_compat.py",
        "integration/hooks/test_torch_private.py",
        "integration/hooks/ddp/test_torch_behaviour.py",
    ),
    "every hook against torch's own hook of the installed version": (
        "integration/hooks/algorithms/test_bf16_quantization_noop.py",
        "integration/hooks/algorithms/test_powersgd.py",
        "integration/hooks/algorithms/test_batched_powersgd.py",
        "integration/hooks/algorithms/test_local_sgd.py",
        "integration/hooks/algorithms/test_half_precision_wrapper.py",
        "integration/hooks/algorithms/test_custom.py",
    ),
    "capture, restore and bucket layouts": (
        "integration/hooks/manage/test_managed_ddp.py",
        "integration/hooks/manage/test_register.py",
        "integration/hooks/manage/test_convert_state.py",
        "integration/hooks/manage/test_exact_resume.py",
        "unit/hooks/state/test_encode.py",
        "unit/hooks/state/test_files.py",
    ),
    "a worker's state": (
        "unit/service/user_code/test_snapshot.py",
        "unit/worker/state/test_hidden_state.py",
        "unit/worker/state/test_name_caches.py",
        "unit/worker/state/test_live_memory.py",
        "unit/worker/state/test_module_state.py",
        "unit/worker/checkpoint/test_thread_load.py",
        "unit/worker/state/test_registered_attributes.py",
        "unit/worker/resume/test_read_checkpoint.py",
        "unit/worker/state/test_change_detection.py",
        "unit/worker/checkpoint/test_saving.py",
        "unit/worker/state/test_shared_state.py",
        "unit/worker/checkpoint/test_host_copy.py",
        "unit/worker/state/test_capture_restore.py",
        "integration/worker/agent/test_forked_ranks.py",
        "integration/worker/training/test_resume.py",
        "integration/worker/checkpoint/test_save_during_training.py",
        "integration/worker/state/test_optimizers.py",
        "integration/worker/state/test_schedulers.py",
        "integration/worker/state/test_hidden_state_jobs.py",
        "integration/worker/session/test_scripts.py",
    ),
    "the proof by steps done again": (
        "unit/contract/checkpoint/test_step_ring.py",
        "unit/worker/state/test_step_fingerprint.py",
        "integration/worker/training/test_replay_proof.py",
    ),
}


def interpreter(name: str) -> str:
    """The path of a working interpreter of that name (``python3.12``). Raises ``SystemExit`` where there is none."""
    for candidate in _candidates(name):
        probe = [candidate, "-c", "import sys, venv, ensurepip; print('python%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(probe, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.startswith(Path(name).name):
            return candidate
    raise SystemExit(
        f"no {name} that works, neither on PATH nor below ~/.pyenv/versions: install it, or give another one"
    )


def _candidates(name: str) -> Iterator[str]:
    for folder in os.get_exec_path():  # behind a shim of pyenv's that does not work there may be another
        if found := shutil.which(name, path=folder):
            yield found
    version = name.removeprefix("python")
    yield from map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"), reverse=True))


def release(asked: str, python: str) -> str:
    """``2.11.0`` for ``2.11.0``; what ``oldest`` and ``newest`` stand for."""
    if asked == "oldest":
        return f"{OLDEST}.0"
    if asked != "newest":
        return asked
    command = [python, "-m", "pip", "index", "versions", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.match(r"torch \(([\d.]+)\)", done.stdout)
    if found is None:
        raise SystemExit(f"pip names no newest version of torch: {done.stdout}{done.stderr}")
    return found[1]


def environment(version: str, python: str) -> Path:
    """The interpreter of an environment with that torch; it is made, or brought up to ``pyproject.toml``, where that is due."""
    said = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True
    )
    folder = ROOT / ".venv-torch" / f"{version}-py{said.stdout.strip()}"
    made, stamp, project = folder / "bin/python", folder / ".installed", ROOT / "pyproject.toml"
    if not made.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    if not stamp.exists() or stamp.stat().st_mtime < project.stat().st_mtime:
        print(f"==> installing torch {version} and Ratchet into {folder.relative_to(ROOT)}", flush=True)
        install = [str(made), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command = [*install, f"torch=={version}", "-e", f"{ROOT}[{EXTRAS}]", *TOOLS]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"pip could not install torch {version} for {python}, as it says above")
        stamp.touch()
    return made


def run(python: Path, jobs: int, further: list[str]) -> tuple[str, bool]:
    """Run the selection; (a line that counts, whether everything passed). ``report.xml`` in the environment lists the tests."""
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    files = [f"tests/{file}" for part in SELECTION.values() for file in part]
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder", *files, *further]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "RATCHET_TEST_HOOKS": "all"}, check=False).returncode
    ask = "import platform, torch; print(f'torch {torch.__version__}, Python {platform.python_version()}')"
    who = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    if not report.exists():
        return f"{who}: pytest ended with {code} and no report", False
    suite = ET.parse(report).getroot()[0]
    total, failures, errors, skipped = (int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped"))
    text = f"{who}: {total - failures - errors - skipped} passed, {failures + errors} failed"
    return text + (f", {skipped} skipped" if skipped else ""), code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="oldest, newest, or a version such as 2.11.0")
    parser.add_argument("--python", default="python3.11", help="name of the interpreter, such as python3.12")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    parser.add_argument("further", nargs="*", help="arguments for pytest, behind --")
    arguments = parser.parse_args()
    python = interpreter(arguments.python)
    line, passed = run(environment(release(arguments.torch, python), python), arguments.jobs, arguments.further)
    print(line)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
