"""Where a Python that has neither Ratchet nor all its requirements finds them: PYTHONPATH. Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = {
    "ratchet": "client", "ratchet_client": "client", "ratchet_service": "service", "ratchet_worker": "worker",
    "ratchet_store": "store", "ratchet_contract": "contract", "ratchet_hooks": "hooks", "ratchet_migrations": "migrations",
}  # fmt: skip
"""Ratchet's packages, and the folders of this repository that they lie in."""


class NoWheels(Exception):
    """There are none in the directory, or pip cannot unpack them."""


@contextmanager
def variables(wheels: Path | None, environ: Mapping[str, str] = os.environ) -> Iterator[dict[str, str]]:
    """``environ`` for all processes of the rows: without the user's own Ratchet settings, and with a PYTHONPATH on which the
    packages of this repository and of the ``wheels`` (a directory) are. Raises ``NoWheels``."""
    with TemporaryDirectory(prefix="ratchet-gpu-wheels-") as folder:
        path = [] if wheels is None else [_unpack(wheels, Path(folder))]
        path += [str(ROOT / source) for name, source in PACKAGES.items() if not _is_here(name, ROOT / source)]
        kept = {k: v for k, v in environ.items() if not k.startswith("RATCHET_") or k.startswith("RATCHET_TEST_")}
        if path:
            kept["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [environ.get("PYTHONPATH")])])
        yield {**kept, "RATCHET_CONFIG": str(Path(folder) / "none.json")}


def _is_here(name: str, source: Path) -> bool:
    """Whether this Python finds the package, and in this repository."""
    spec = find_spec(name)
    return spec is not None and source in Path(spec.origin or "").parents


def _unpack(wheels: Path, folder: Path) -> str:
    files = sorted(map(str, wheels.glob("*.whl")))
    here = "{}.{}".format(*sys.version_info)
    cure = f"`python3 -m tests.gpu.wheels --to {wheels} --python {here}` downloads them where there is a network"
    if not files:
        raise NoWheels(f"{wheels}: no wheels; {cure}")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
    ]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--target", str(folder), *files], capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().rstrip(".")
        raise NoWheels(f"pip cannot unpack the wheels of {wheels} for {sys.executable}, Python {here}: {said}; {cure}")
    return str(folder)
