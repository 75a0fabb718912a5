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
        "unit/test_torch_compat.py", "integration/test_torch_private.py", "integration/test_hooks_torch_pin.py",
    ),
    "every hook against torch's own hook of the installed version": (
        "integration/test_hooks_plain.py", "integration/test_hooks_low_rank.py", "integration/test_hooks_batched.py",
        "integration/test_hooks_local_sgd.py", "integration/test_hooks_wrappers.py", "integration/test_hooks_custom.py",
    ),
    "capture, restore and bucket layouts": (
        "integration/test_hooks_laws.py", "integration/test_hooks_registration.py", "integration/test_hooks_carry.py",
        "integration/test_hooks_exact.py", "unit/test_hooks_codec.py", "unit/test_hooks_files.py",
    ),
    "a worker's state": (
        "unit/test_snapshot.py", "unit/test_worker_hidden_state.py", "unit/test_worker_kept_names.py",
        "unit/test_worker_live_memory.py", "unit/test_worker_module_state.py", "unit/test_worker_quiet.py",
        "unit/test_worker_registered_attributes.py", "unit/test_worker_restore.py", "unit/test_worker_same.py",
        "unit/test_worker_saving.py", "unit/test_worker_shared_state.py", "unit/test_worker_staging.py",
        "unit/test_worker_state.py", "integration/test_forked_ranks.py", "integration/test_worker_resume.py",
        "integration/test_worker_saves.py", "integration/test_optimizers.py", "integration/test_worker_schedulers.py",
        "integration/test_worker_hidden_state.py", "integration/test_worker_scripts.py",
    ),
    "the proof by steps done again": (
        "unit/test_step_ring.py", "unit/test_worker_step_fingerprint.py", "integration/test_replay_proof.py",
    ),
}  # fmt: skip


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
