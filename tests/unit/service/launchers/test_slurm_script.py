"""Batch scripts as whole texts, and what is refused because no script can honour it.

After a wanted change: RATCHET_RECORD=1 pytest tests/unit/service/launchers/test_slurm_script.py, and read the difference.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Desired
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.launchers.launch_file import build_launch_file
from ratchet_service.launchers.slurm.batch_script import option, render_script
from ratchet_service.launchers.slurm.launcher import SlurmLauncher
from ratchet_service.launchers.slurm.settings import Settings, parse_settings

GOLDEN = Path(__file__).parent / "golden"
HOME = HomePaths(Path("/shared/ratchet"))
SETTINGS: dict[str, Any] = {"python": "/shared/venv/bin/python", "defaults": {"partition": "gpu", "account": "vision"}}
CASES: dict[str, dict[str, Any]] = {
    "smallest": {},
    "several-nodes": {
        "world": {"nodes": 4, "ranks_per_node": 8},
        "resources": {"cpus_per_rank": 6, "memory": "480Gi", "gpu": "a100"},
        "secrets": {"WANDB_API_KEY": {"from_env": "WANDB_API_KEY"}},
        "launcher": {
            "partition": "large", "qos": "night", "constraint": "ib&hbm", "reservation": "maint", "time_limit": "12h",
            "exclusive": True, "setup": ["module load cuda/12.8", "ulimit -n 65536"],
            "options": {"nodelist": "n[1-4]", "mail-user": 'me "x" \\ $HOME', "contiguous": None},
        },
    },
    "apptainer": {
        "image": "/images/my worker.sif",
        "resources": {"gpu": "gpu"},
        "world": {"device": "cuda", "ranks_per_node": 2},
        "volumes": [
            {"host_path": "/data", "mount_path": "/data"},
            {"host_path": "/scratch/x y", "mount_path": "/scratch", "read_only": False},
        ],
    },
    "pyxis": {
        "image": "registry.example#team/worker:1",
        "launcher": {"container": "pyxis", "gres": "gpu:h100:2,nvme:1"},
        "volumes": [{"host_path": "/data", "mount_path": "/mnt"}],
    },
}  # fmt: skip


def spec_of(**more: Any) -> JobSpec:
    launcher = {"kind": "slurm", **more.pop("launcher", {})}
    return JobSpec.model_validate({"name": "a", "task": {"entrypoint": "m:T"}, "launcher": launcher, **more})


def launch(home: HomePaths = HOME, **more: Any) -> LaunchFile:
    spec = spec_of(**more)
    device = "cuda" if spec.resources.gpu else "cpu"
    resolved = Resolved(
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
        threads_per_rank=spec.resources.cpus_per_rank or 1,
        python="/shared/venv/bin/python",
    )
    return build_launch_file(home, "job-0123456789ab", 3, spec, resolved, (), "secret-token", Desired.RUN)


def refusals(**more: Any) -> dict[str, str]:
    launcher = SlurmLauncher(HOME, parse_settings(SETTINGS), {})
    return {problem.pointer: problem.detail for problem in launcher.check(spec_of(**more))[1]}


@pytest.mark.parametrize("name", CASES)
def test_batch_script_matches_golden_file(name: str) -> None:
    made = render_script(launch(**CASES[name]), parse_settings(SETTINGS), HOME)
    file = GOLDEN / f"slurm-{name}.sh"
    if os.environ.get("RATCHET_RECORD"):
        file.write_text(made)
    assert made == file.read_text()
    subprocess.run(["bash", "-n"], input=made, text=True, check=True)
    assert refusals(**CASES[name]) == {}


def test_measured_save_time_shortens_signal_notice() -> None:
    slow = launch(policy={"stop_grace": 600})
    assert "--signal=USR1@620\n" in render_script(slow, parse_settings(SETTINGS), HOME)
    assert "--signal=USR1@27\n" in render_script(
        slow.model_copy(update={"save_seconds": 3.1}), parse_settings(SETTINGS), HOME
    )


def test_excluded_nodes_are_added_to_those_of_the_jobs_own_option() -> None:
    away = {"exclude_nodes": ["n7", "n9"]}
    alone = render_script(launch().model_copy(update=away), parse_settings(SETTINGS), HOME)
    assert "#SBATCH --exclude=n7,n9\n" in alone
    own = launch(launcher={"options": {"exclude": "old[1-3]"}})
    both = render_script(own.model_copy(update=away), parse_settings(SETTINGS), HOME)
    assert "#SBATCH --exclude=old[1-3],n7,n9\n" in both and both.count("--exclude=") == 1
    assert "#SBATCH --exclude=old[1-3]\n" in render_script(own, parse_settings(SETTINGS), HOME)
    assert "--exclude=" not in render_script(launch(), parse_settings(SETTINGS), HOME)


def test_plan_with_image_uses_python_inside_image() -> None:
    launcher = SlurmLauncher(HOME, parse_settings(SETTINGS), {})
    plan = launcher.plan(launch(**CASES["apptainer"]))
    assert plan.argv[0] == plan.ranks[0]["command"][0] == "python"
    plan = launcher.plan(launch())
    assert plan.argv[0] == plan.ranks[0]["command"][0] == "/shared/venv/bin/python"


@pytest.mark.parametrize("text", ["a b", "$(id)", "`id`", 'a"b', "a'b", "a\\", "#x", ";id", "ä"])
def test_user_text_is_shell_quoted_in_batch_script(text: str) -> None:
    """sbatch's own reading of options is asked in the tests with a real Slurm; here it is the shell's."""
    home = HomePaths(Path(f"/shared/{text}"))
    lines = render_script(launch(home, image=text), parse_settings(SETTINGS), home).replace("\\\n", "").splitlines()
    words = shlex.split(next(line for line in lines if line.startswith("srun")))
    assert text in words
    assert f"/shared/{text}:/shared/{text}" in words
    assert f"RATCHET_ATTEMPT_DIR=/shared/{text}/jobs/job-0123456789ab/attempts/0003" in shlex.split(
        next(line for line in lines if line.startswith("export"))
    )


def test_sbatch_option_with_line_break_is_refused() -> None:
    with pytest.raises(ValueError, match="line break"):
        option("output", "/a\n#SBATCH --uid=0")


@pytest.mark.parametrize(
    ("more", "pointer", "said"),
    [
        ({"launcher": {"time_limit": 240}}, "/launcher/time_limit", "at least 260 s"),
        ({"policy": {"stop_grace": 70_000}}, "/policy/stop_grace", "65535"),
        ({"resources": {"gpu": "nvidia.com/gpu"}}, "/resources/gpu", "not a gres type"),
        ({"world": {"device": "cuda"}}, "/resources/gpu", "no GPU is requested"),
        ({"secrets": {"A": {"from_secret": {"name": "a", "key": "b"}}}}, "/secrets/A", "from_env"),
        ({"launcher": {"options": {"time": "5"}}}, "/launcher/options/time", "/launcher/time_limit"),
        ({"launcher": {"options": {"mem": "5G"}}}, "/launcher/options/mem", "/resources/memory"),
        ({"launcher": {"options": {"test-only": None}}}, "/launcher/options/test-only", "submit nothing"),
        ({"launcher": {"options": {"arra": "0-1"}}}, "/launcher/options/arra", "abbreviation of array"),
        ({"launcher": {"options": {"reque": None}}}, "/launcher/options/reque", "abbreviation of requeue"),
        ({"launcher": {"options": {"uid": "0"}}}, "/launcher/options/uid", "the user of the service"),
        ({"volumes": [{"claim": "data", "mount_path": "/data"}]}, "/volumes/0/claim", "host_path"),
        ({"volumes": [{"empty_dir": "1Gi", "mount_path": "/data"}]}, "/volumes/0/empty_dir", "host_path"),
        ({"volumes": [{"host_path": "/a", "mount_path": "/b"}]}, "/volumes/0/mount_path", "without an image"),
        (
            {"image": "x", "volumes": [{"host_path": "/a,b", "mount_path": "/b"}]},
            "/volumes/0/host_path",
            "comma",
        ),
        (
            {"image": "x", "volumes": [{"host_path": "/a", "mount_path": "/b", "sub_path": "c"}]},
            "/volumes/0/sub_path",
            "whole path",
        ),
    ],
)
def test_unsupported_slurm_option_is_refused_with_pointer(more: dict[str, Any], pointer: str, said: str) -> None:
    found = refusals(**more)
    assert list(found) == [pointer] and said in found[pointer]


def test_host_volumes_without_image_are_warned_about() -> None:
    launcher = SlurmLauncher(HOME, parse_settings(SETTINGS), {})
    warnings, problems = launcher.check(spec_of(volumes=[{"host_path": "/data", "mount_path": "/data"}]))
    assert problems == [] and [warning.code for warning in warnings] == ["volumes-as-they-are"]


def test_job_launcher_options_override_site_defaults() -> None:
    settings = parse_settings({"defaults": {"partition": "gpu", "time_limit": "1h", "options": {"nice": "10"}}})
    own = settings.effective_launcher(spec_of(launcher={"partition": "cpu"}))
    assert (own.partition, own.time_limit, own.options) == ("cpu", 3600.0, {"nice": "10"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"partition": "gpu"}, "partition"),
        ({"defaults": {"partitions": "gpu"}}, "defaults.partitions"),
        ({"defaults": {"options": {"requeue": None}}}, "defaults.options.*set by Ratchet"),
        ({"poll_seconds": 0}, "poll_seconds"),
        ({"commands": "bin"}, "commands"),
    ],
)
def test_invalid_launcher_settings_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_settings(given)


def test_launcher_settings_have_defaults() -> None:
    assert parse_settings({}) == Settings()
