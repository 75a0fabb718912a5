"""The picture of the README, ``docs/kills.svg``: the loss of a run that is killed three times, under Ratchet and as PyTorch's
page on communication hooks saves and reloads, beside that of the run that nobody touched. Fails unless Ratchet's is the same."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.scripts.kills_loop import EVERY, KILLS, RANK, WARM_UP
from examples.demo.picture import Curve, Interruption, draw

PICTURE: Final = Path(__file__).parents[1] / "docs" / "kills.svg"
_SCRIPTS: Final = Path(__file__).with_name("scripts")
_BIN: Final = Path(sys.executable).parent
_SECONDS: Final = 300
Losses = dict[int, float]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        undisturbed, documented = (_torch(kind, Path(place, kind)) for kind in ("undisturbed", "documented"))
        killed = _ratchet(Path(place, "ratchet"))
    print(f"{'step':>6}  {'undisturbed':>12}  {'Ratchet':>12}  {'documented':>12}")
    for step in sorted({*range(EVERY, len(undisturbed), EVERY), len(undisturbed)}):
        print(f"{step:>6}  {undisturbed[step]:>12.6f}  {killed[step]:>12.6f}  {documented[step]:>12.6f}")
    largest = max(abs(killed[step] - undisturbed[step]) for step in undisturbed)
    apart = max(abs(documented[step] - undisturbed[step]) for step in undisturbed)
    print(f"largest difference from the undisturbed run: Ratchet {largest}, documented {apart:.3f}")
    if killed != undisturbed:
        raise SystemExit("Ratchet's run is not the undisturbed one")
    curves = [
        Curve("undisturbed", "#f2b134", 7.0, sorted(undisturbed.items())),
        Curve("PyTorch's documented recipe, killed", "#c1121f", 1.8, sorted(documented.items())),
        Curve("Ratchet, killed (on the undisturbed curve)", "#1d3557", 1.8, sorted(killed.items())),
    ]
    marks = [Interruption(step, step - step % EVERY, "kill -9", "#777") for step in KILLS]
    title = "Loss of a run that is killed three times (PowerSGD, 2 ranks, CPU). Grey: steps trained again after a kill"
    draw(PICTURE, title, curves, marks)
    print(f"{PICTURE} is written")


def _torch(kind: str, place: Path) -> Losses:
    """Start torchrun again after each kill."""
    place.mkdir()
    command = [str(_BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(_SCRIPTS / "kills_recipe.py"), kind]
    for _ in range(len(KILLS) + 1 if kind == "documented" else 1):
        done = _run(command, place, errors=subprocess.PIPE)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return _losses((place / "losses.txt").read_text())


def _ratchet(place: Path) -> Losses:
    hook = f"hook={{name: powerSGD, matrix_approximation_rank: {RANK}, start_powerSGD_iter: {WARM_UP}}}"
    sets = [hook, f"checkpoint.every_steps={EVERY}", "checkpoint.first=off", "policy.backoff=0.1"]
    options = [word for one in sets for word in ("--set", one)]
    command = [str(_BIN / "ratchet"), "run", "--nproc", "2", *options, "--outputs", "out", str(_SCRIPTS / "kills.py")]
    place.mkdir()
    _run(command, place).check_returncode()
    return _losses((place / "out" / "losses.txt").read_text())


def _run(command: Sequence[str], place: Path, errors: int | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=place, env=env, timeout=_SECONDS, stderr=errors, text=True)


def _losses(text: str) -> Losses:
    """By step; of one that was done again the last."""
    rows = (line.split() for line in text.splitlines())
    return {int(step): float(loss) for step, loss in rows}
