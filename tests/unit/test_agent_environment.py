"""What a rank is started with: whose word counts, and what never reaches it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.errors import UserError
from ratchet_contract.messages import LaunchFile
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.spec import Resolved
from ratchet_contract.spec_parse import parse_spec
from ratchet_worker.launch_env import plan_ranks
from ratchet_worker.starter import RankPlan

INHERITED = {
    "PATH": "/bin",
    "RATCHET_DATABASE_URL": "postgres://secret",
    "TORCHELASTIC_RUN_ID": "other",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "OMP_NUM_THREADS": "64",
    "RANK": "9",
    "SOURCE": "value",
}


def plans(
    spec: dict[str, Any], device: str = "cpu", inherited: dict[str, str] = INHERITED, **launch: Any
) -> list[RankPlan]:
    data = {"name": "x", "task": {"entrypoint": "a:B"}, "world": {"ranks_per_node": 2}, **spec}
    resolved = {"device": device, "backend": "nccl" if device == "cuda" else "gloo", "threads_per_rank": 3}
    file = LaunchFile(
        job_id="j",
        epoch=4,
        world_size=2,
        ranks=[0, 1],
        spec=parse_spec(data),
        resolved=Resolved(python=sys.executable, **resolved),
        job_root="/j",
        attempt_dir="/j/a",
        workdir="/code",
        report_token="TOKEN",
        service_file="/s",
        **launch,
    )
    return plan_ranks(file, AttemptPaths(Path("/j/a")), store_port=4321, store_fd=7, inherited=inherited)


def test_identity_as_torchrun_gives_it() -> None:
    first, second = plans({})
    assert first.command == [sys.executable, "-P", "-m", "ratchet_worker.rank"] and first.cwd == Path("/code")
    for name, value in {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321", "TORCHELASTIC_RUN_ID": "j-a4",
        "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RATCHET_JOB_ID": "j", "RATCHET_EPOCH": "4", "RATCHET_ATTEMPT_DIR": "/j/a",
        "RATCHET_LAUNCH_FILE": "/j/a/launch.json", "RATCHET_AGENT_PID": str(os.getpid()),
    }.items():  # fmt: skip
        assert second.env[name] == value, name
    assert (first.env["RATCHET_STORE_FD"], first.pass_fds) == ("7", (7,))
    assert "RATCHET_STORE_FD" not in second.env and second.pass_fds == ()


def test_what_is_inherited_and_what_is_not() -> None:
    env = plans({})[0].env
    assert env["PATH"] == "/bin" and env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert "RATCHET_DATABASE_URL" not in env and "TOKEN" not in str(env)
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert (env["GLOO_SOCKET_IFNAME"], env["PYTHONUNBUFFERED"]) == ("lo", "1")
    assert plans({}, "cuda", gpus=[2, 5])[0].env["CUDA_VISIBLE_DEVICES"] == "2,5"


def test_scripts_get_torchruns_setting_of_nccl_and_tasks_keep_torchs_own() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    script: dict[str, Any] = {"task": None, "script": ["train.py"], "code": {"path": "/code"}}
    assert plans(script)[0].env[name] == "1" and name not in plans({})[0].env
    assert plans(script, inherited={name: "2"})[0].env[name] == "2"
    assert plans({**script, "env": {name: "3"}})[0].env[name] == "3"


def test_spec_beats_defaults_and_secrets_are_resolved() -> None:
    spec = {
        "env": {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "0"},
        "secrets": {"KEY": {"from_env": "SOURCE"}},
        "nccl": {"NCCL_NSOCKS_PERTHREAD": 4},
    }
    env = plans(spec, "cuda")[0].env
    assert (env["OMP_NUM_THREADS"], env["PYTHONUNBUFFERED"], env["KEY"]) == ("2", "0", "value")
    assert env["NCCL_NSOCKS_PERTHREAD"] == "4"
    assert "NCCL_NSOCKS_PERTHREAD" not in plans(spec)[0].env  # gloo
    handed_over = {k: v for k, v in INHERITED.items() if k != "SOURCE"} | {"KEY": "from the launcher"}
    assert plans(spec, inherited=handed_over)[0].env["KEY"] == "from the launcher"
    with pytest.raises(UserError, match="SOURCE"):
        plans({"secrets": {"KEY": {"from_env": "SOURCE"}}}, inherited={})


def test_determinism_settings_come_from_the_seed() -> None:
    seed = 2**40 + 5
    env = plans({"seed": seed})[0].env
    assert (env["PYTHONHASHSEED"], env["CUBLAS_WORKSPACE_CONFIG"]) == ("5", ":4096:8")
    env = plans({"seed": seed, "determinism": "off"})[0].env
    assert "PYTHONHASHSEED" not in env and "CUBLAS_WORKSPACE_CONFIG" not in env
