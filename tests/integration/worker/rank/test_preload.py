"""Packages that are imported before an attempt: those whose import changes more than the list of modules are left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys, sysconfig
from pathlib import Path
site, code, names = sys.argv[1], sys.argv[2], sys.argv[3:]
real = sysconfig.get_path
sysconfig.get_path = lambda name: site if name == "purelib" else real(name)
sys.path.append(site)
from ratchet_worker.rank import preload
for group in names:
    group = group.split(",")
    forked = preload.fork_with_packages(group, [code])
    print(json.dumps([forked, [name for name in group if name in sys.modules]]), flush=True)
    if forked:
        preload.os._exit(preload.OTHER_CODE)
"""
EFFECTS = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "threads",
    ),
    "seeds": ("import random\nrandom.seed(3)", "random"),
    "numpy_seeds": ("import numpy\nnumpy.random.seed(3)", "numpy's generator"),
    "torch_draws": ("import torch\ntorch.rand(1)", "torch's generator"),
    "sets": ("import os\nos.environ['COLOUR'] = 'blue'", "variables"),
    "moves": ("import os\nos.chdir('/usr')", "the current directory"),
    "handles": ("import signal\nsignal.signal(signal.SIGUSR1, print)", "signals"),
    "paths": ("import sys\nsys.path.insert(0, '/nowhere')", "the import path"),
    "defaults": ("import torch\ntorch.set_default_dtype(torch.float64)", "torch's settings"),
    "opens": ("import os\nos.open('/dev/zero', os.O_RDONLY)", "open files"),
    "fails": ("raise RuntimeError('no')", "RuntimeError: no"),
    "leaves": ("raise SystemExit(0)", "SystemExit"),
}


def fork_with(
    tmp_path: Path, names: list[str], packages: dict[str, str], code: tuple[str, ...] = ()
) -> tuple[list[list[object]], str]:
    """What the fork, if there was one, and the server then have imported of ``names``, and what they have printed besides."""
    site, folder = tmp_path / "site", tmp_path / "code"
    for place in (site, folder):
        place.mkdir(exist_ok=True)
    for name, text in packages.items():
        (site / f"{name}.py").write_text(text)
    for name in code:
        (folder / name).write_text("")
    argv = [sys.executable, "-c", PROGRAM, str(site), str(folder), *names]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_packages_with_effects_are_left_out_and_named_and_the_others_imported(tmp_path: Path) -> None:
    plain = {"plain": "import random\nrandom.random()", "needs": "import colorsys"}
    packages = plain | {name: text for name, (text, _) in EFFECTS.items()}
    (tmp_path / "own.py").write_text("")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "linked.py").symlink_to(tmp_path / "own.py")
    groups = ["plain,sets,absent,thread,../own,linked,needs", *EFFECTS]
    outputs, printed = fork_with(tmp_path, groups, packages, ("colorsys.py",))
    assert outputs == [[True, ["plain"]], *[[False, []]] * (1 + len(EFFECTS))]
    lines = dict(line.split(" is not imported in advance: ") for line in printed.splitlines())
    for name, (_, word) in EFFECTS.items():
        assert word in lines[f"ratchet: {name}"]
    assert lines["ratchet: needs"] == "the job's code has modules of the same name as it imports: colorsys"
