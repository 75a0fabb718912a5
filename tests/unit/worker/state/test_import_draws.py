"""What packages draw from ``random`` while they are imported is taken back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import random, sys, sysconfig
from ratchet_worker.state import import_draws

sys.path.insert(0, sys.argv[1])
installed = sysconfig.get_path("purelib")
random.seed(1)
import_draws.undo_import_draws()
before = random.getstate()
{body}
"""


def passes(tmp_path: Path, body: str, **modules: str) -> None:
    """``modules``: the user's own, by name."""
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    program = PROGRAM.format(body=body)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_random_draws_during_package_import_are_undone(tmp_path: Path) -> None:
    passes(tmp_path, "import rich.style\nassert random.getstate() == before and rich.style.Style(bold=True)")
    with pytest.raises(AssertionError):  # it does draw
        passes(tmp_path, "sys.meta_path.pop(0)\nimport rich.style\nassert random.getstate() == before, 'it draws'")


def test_draws_of_user_module_stay_while_nested_package_draws_are_undone(tmp_path: Path) -> None:
    own = "import random\nimport rich.style\ndrawn = random.random()"
    body = "import own\nassert own.drawn == random.Random(1).random() and random.getstate() != before"
    passes(tmp_path, body, own=own)


def test_seeding_during_package_import_is_kept(tmp_path: Path) -> None:
    body = (
        "from pathlib import Path\nimport_draws.installed_folders = lambda: (Path(sys.argv[1]),)\n"
        "import seeding\nassert random.random() == random.Random(42).random()"
    )
    passes(tmp_path, body, seeding="import random\nrandom.seed(42)")


def test_import_draws_are_undone_across_generator_block_boundary(tmp_path: Path) -> None:
    body = (
        "from pathlib import Path\nimport_draws.installed_folders = lambda: (Path(sys.argv[1]),)\n"
        "[random.getrandbits(32) for _ in range(600)]\nbefore = random.getstate()\n"
        "import drawing\nassert random.getstate() == before"
    )
    passes(tmp_path, body, drawing="import random\n[random.random() for _ in range(40)]\nrandom.gauss(0, 1)")
