"""An attempt that reaches Slurm twice, as when the answer to its submission was lost; what a service keeps of the past.

On a real slurmctld, with the agents' stand-in of ``tests.support.fake_slurm_agent``.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet_contract.phases import Cause
from ratchet_service.launchers.slurm import launcher
from ratchet_service.launchers.slurm.launcher import SlurmLauncher
from ratchet_service.launchers.slurm.settings import Settings
from tests.integration.service.launchers.test_slurm import PATIENCE, Site, cluster, over, site
from tests.support.server import wait_for
from tests.support.slurm import missing_reason

__all__ = ["cluster", "site"]

pytestmark = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))


def submits_twice(site: Site, folder: Path) -> SlurmLauncher:
    folder.mkdir()
    for name in ("squeue", "sinfo", "scancel", "sacct"):
        (folder / name).symlink_to(str(shutil.which(name)))
    sbatch = str(shutil.which("sbatch"))
    (folder / "sbatch").write_text(
        f'#!/bin/sh\ncat >{folder}/script\nfor _ in 1 2; do {sbatch} "$@" <{folder}/script; done\n'
    )
    (folder / "sbatch").chmod(0o755)
    settings = Settings(python=str(site.python), commands=str(folder), poll_seconds=0.1, file_seconds=0.5)
    return SlurmLauncher(site.home, settings, {"PATH": os.environ["PATH"], **site.cluster.variables})


@pytest.mark.parametrize("beside", [True, False], ids=["at-once", "queued"])
def test_attempt_submitted_to_slurm_twice_runs_once(site: Site, tmp_path: Path, beside: bool) -> None:
    made = submits_twice(site, tmp_path / "bin")
    ref = site.begin(made, launcher={"exclusive": not beside})

    def second() -> list[str]:
        listed = site.cluster.run("squeue", "-h", "--states=all", f"--name={ref.name}", "-o", "%T")
        return [word for word in listed.split() if word != "RUNNING"]

    def settled() -> bool:
        made.poll(ref)
        return second() in (["FAILED"], ["CANCELLED"])

    wait_for(settled, "the second one to end", PATIENCE)
    time.sleep(0.2)  # longer than an answer of squeue holds
    state = made.poll(ref)
    assert state.alive and state.lost == () and state.waiting is None and state.ends == ()
    made.stop(ref, 5)
    over(made, ref)
    state = made.poll(ref)
    assert [result.cause for result in state.results] == [Cause.SIGTERM] * 2 and state.ends == ()


def test_kill_queries_slurm_again_instead_of_using_the_cached_answer(site: Site) -> None:
    """Another reconciler may have submitted it since this one asked, and given it up."""
    made = site.launcher(period=60)
    plan = made.plan(site.launch(nodes=1))
    assert not made.poll(plan.ref).alive
    site.started.append(plan.ref)
    site.launcher().submit(plan)
    assert made.kill(plan.ref) != []


def test_slurm_launcher_forgets_attempts_long_over(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made = site.launcher()
    ref = site.begin(made, nodes=1, act={"0": "deaf"})
    wait_for(lambda: made.kill(ref) == [] and not made.poll(ref).alive, "it to end", PATIENCE)
    now = time.monotonic()
    with monkeypatch.context() as later:
        later.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: now + 100_000))
        made.sweep(lambda names: names)
    kept = (made._submitted_at, made._results_seen_at, made._ended_seen_at, made._accounting_jobs, made._cancelled_at)
    assert all(not each for each in kept), kept
