"""This checkout as another version of Ratchet: its packages below a directory, to be run by processes of their own."""

from __future__ import annotations

import os
import shutil
import sysconfig
import venv
from pathlib import Path

from ratchet_contract.version import PROTOCOL_VERSION

ROOT = Path(__file__).parents[2]
PACKAGES = ("client", "contract", "hooks", "migrations", "service", "store", "worker")


def version_environment(root: Path) -> dict[str, str]:
    """Variables of a process that runs the packages below ``root``, a checkout, in the place of what is installed."""
    path = os.pathsep.join([str(root), *(str(root / name) for name in PACKAGES)])
    return {k: v for k, v in os.environ.items() if not k.startswith("RATCHET_")} | {"PYTHONPATH": path}


def copy_with_protocol(folder: Path, number: int) -> Path:
    """This checkout's packages and its tests' support below ``folder``, speaking protocol ``number``: agents' files, messages and
    reports have keys that this checkout does not know."""
    for name in (*PACKAGES, "tests/support"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    version, messages = (folder / "contract/ratchet_contract" / name for name in ("version.py", "protocol/messages.py"))
    _replace(version, f"PROTOCOL_VERSION: Final = {PROTOCOL_VERSION}", f"PROTOCOL_VERSION: Final = {number}")
    for key in ("    pid: int\n    start_time: int\n    host: str\n", '    kind: Literal["progress"] = "progress"\n',
                '    kind: Literal["checkpoint"] = "checkpoint"\n', "    exit_code: int | None\n    last_step: int\n",
                "    cause: Cause\n    rank: int | None = Field", "    phase: AttemptPhase\n    last_step"):  # fmt: skip
        _replace(messages, key, f'    weather: str = "fine"\n{key}')
    return folder


def install_copy(folder: Path, root: Path) -> Path:
    """The interpreter of a virtual environment ``folder`` that has the packages below ``root``, a checkout, and all others of
    this interpreter. Once more for the same folder: in the place of what it had."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    lines = [*(str(root / name) for name in PACKAGES), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (site / "checkout.pth").write_text("\n".join(lines))
    return python


def _replace(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1, (file, before)
    file.write_text(text.replace(before, after))
