"""The launcher of ``examples/launcher`` as a user's own: installed beside Ratchet, named in a launchers file, running a job.

No other machine is here: ``ssh HOST`` is a clean shell of this one, which gets the same line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from ratchet_contract.paths import HomePaths
from ratchet_service.launchers.base import AttemptRef, EngineUnreachable
from tests.support.cli import Cli
from tests.support.server import Server, wait_for

EXAMPLE = Path(__file__).parents[4] / "examples" / "launcher"
SPEC = """
name: elsewhere
task: {entrypoint: "ratchet_worker.tasks.digits:DigitsTask", args: {epochs: 2}}
world: {ranks_per_node: 1, device: cpu}
resources: {cpus_per_rank: 1}
launcher: {kind: ssh}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``pip install ./examples/launcher`` leaves: the module, and metadata with its entry point."""
    site = tmp_path / "site-packages"
    metadata = site / "ratchet_ssh-1.0.dist-info"
    metadata.mkdir(parents=True)
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    (module,) = project["tool"]["setuptools"]["py-modules"]
    shutil.copy(EXAMPLE / f"{module}.py", site)
    points = project["project"]["entry-points"]["ratchet.launchers"]
    lines = [f"{name} = {target}" for name, target in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[ratchet.launchers]", *lines, ""]))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ratchet-ssh\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.fixture
def launchers(tmp_path: Path) -> Path:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = ["env", "-i", f"PATH={path}", "sh", "-c"]
    file = tmp_path / "launchers.yaml"
    file.write_text(yaml.safe_dump({"local": {}, "ssh": {"remote": shell}}))
    return file


def test_a_job_runs_under_a_launcher_of_another_package(site: Path, launchers: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "home", "--launchers", str(launchers))
    cli = Cli(server.home, tmp_path)
    (tmp_path / "spec.yaml").write_text(SPEC)
    try:
        server.start()
        shown = cli("submit", "spec.yaml", "--dry-run").text
        assert "# what the engine is asked for: shell line\ncd /; setsid env RATCHET_ATTEMPT_DIR=" in shown
        job = cli("submit", "spec.yaml").text.strip()
        cli("wait", job, deadline=180)
        (attempt,) = server.attempts(job)
        assert (attempt["cause"], attempt["nodes"][0]["phase"]) == ("completed", "ENDED")
        refused = cli("submit", "spec.yaml", "--set", "image=a", "--set", "launcher.options.x=1", expect=5).errors
        assert all(f"{key}: the launcher ssh knows nothing of it" in refused for key in ("/image", "/launcher/options"))
    finally:
        server.stop()


@pytest.fixture
def strays() -> Iterator[Callable[[AttemptRef], subprocess.Popen[bytes]]]:
    """Processes that belong to an attempt."""
    made: list[subprocess.Popen[bytes]] = []

    def make(ref: AttemptRef) -> subprocess.Popen[bytes]:
        environment = {"RATCHET_ATTEMPT_DIR": str(ref.paths.root), "PATH": os.environ["PATH"]}
        made.append(subprocess.Popen(["timeout", "120", "sleep", "120"], env=environment))
        return made[-1]

    yield make
    for process in made:
        process.kill()
        process.wait(10)


def test_example_launcher_stops_kills_and_sweeps_only_its_attempts(
    site: Path, tmp_path: Path, strays: Callable[[AttemptRef], subprocess.Popen[bytes]]
) -> None:
    from ratchet_ssh import make

    home = HomePaths(tmp_path / "home")
    launcher = make(home, {"remote": ["sh", "-c"]})
    refs = [AttemptRef(f"job-{n:012d}", 7, home.job(f"job-{n:012d}").attempt(7)) for n in range(3)]
    stopped, killed, swept = (strays(ref) for ref in refs)
    for ref in refs:
        wait_for(lambda ref=ref: launcher.poll(ref).alive, "it to be seen")
    launcher.stop(refs[0], 10)
    assert stopped.wait(20) == -15 and launcher.kill(refs[0]) == []
    assert launcher.kill(refs[1]) and killed.wait(20) == -9
    wait_for(lambda: not launcher.kill(refs[1]), "it to be proved dead")
    assert launcher.sweep(lambda names: names) == [] and swept.poll() is None
    assert launcher.sweep(lambda names: []) == [refs[2].name] and swept.wait(20) == -9


def test_example_launcher_raises_for_unreachable_machine_and_bad_settings(site: Path, tmp_path: Path) -> None:
    from ratchet_ssh import make

    home = HomePaths(tmp_path / "home")
    ref = AttemptRef("job-000000000001", 7, home.job("job-000000000001").attempt(7))
    with pytest.raises(EngineUnreachable, match="ended with 255"):
        make(home, {"remote": ["sh", "-c", "exit 255"]}).poll(ref)
    with pytest.raises(ValueError, match="ssh: remote: Field required"):
        make(home, {})
