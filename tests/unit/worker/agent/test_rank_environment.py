"""What a rank is started with: whose word counts, and what never reaches it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.errors import UserError
from ratchet_contract.paths import AttemptPaths
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_worker.agent.rank_environment import plan_ranks
from ratchet_worker.agent.rank_starter import RankPlan
from ratchet_worker.agent.rendezvous import Rendezvous

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
    spec: dict[str, Any],
    device: str = "cpu",
    inherited: dict[str, str] = INHERITED,
    *,
    node: int = 0,
    host: str = "127.0.0.1",
    **launch: Any,
) -> list[RankPlan]:
    data = {"name": "x", "task": {"entrypoint": "a:B"}, "world": {"ranks_per_node": 2}, **spec}
    resolved = {"device": device, "backend": "nccl" if device == "cuda" else "gloo", "threads_per_rank": 3}
    file = LaunchFile(
        job_id="j",
        attempt=4,
        world_size=2 * data["world"].get("nodes", 1),
        ranks=[0, 1],
        spec=JobSpec.model_validate(data),
        resolved=Resolved(python=sys.executable, **resolved),
        job_root="/j",
        attempt_dir="/j/a",
        workdir="/code",
        report_token="TOKEN",
        service_file="/s",
        **launch,
    )
    with socket.socket() as listener:
        place = Rendezvous(host, 4321, "eth7" if file.spec.world.nodes > 1 else "lo", listener)
        found = plan_ranks(file.for_node(node), AttemptPaths(Path("/j/a")), place, inherited=inherited)
        assert [plan.pass_fds for plan in found] == [(listener.fileno(),) * (plan.rank == 0) for plan in found]
    return found


def test_rank_identity_variables_match_torchrun() -> None:
    first, second = plans({})
    assert first.command == [sys.executable, "-P", "-m", "ratchet_worker.rank"] and first.cwd == Path("/code")
    for name, value in {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321", "TORCHELASTIC_RUN_ID": "j-a4",
        "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RATCHET_JOB_ID": "j", "RATCHET_ATTEMPT": "4", "RATCHET_ATTEMPT_DIR": "/j/a",
        "RATCHET_LAUNCH_FILE": "/j/a/launch.json", "RATCHET_AGENT_PID": str(os.getpid()),
    }.items():  # fmt: skip
        assert second.env[name] == value, name
    assert first.env["RATCHET_STORE_FD"] == str(first.pass_fds[0])
    assert "RATCHET_STORE_FD" not in second.env and second.pass_fds == ()


def test_rank_identity_variables_on_second_of_three_nodes() -> None:
    world = {"world": {"nodes": 3, "ranks_per_node": 2}}
    third, fourth = plans(world, node=1, host="fd00::1")
    for name, value in {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "6", "MASTER_ADDR": "fd00::1", "MASTER_PORT": "4321",
        "RATCHET_ATTEMPT_DIR": "/j/a", "RATCHET_NODE_DIR": "/j/a/node-00001", "RATCHET_LAUNCH_FILE": "/j/a/launch.json",
    }.items():  # fmt: skip
        assert fourth.env[name] == value, name
    assert third.log == Path("/j/a/logs/rank-00002.log") and "RATCHET_STORE_FD" not in third.env
    assert plans(world)[0].env["RATCHET_NODE_DIR"] == "/j/a"


def test_socket_interface_is_set_to_node_network_interface() -> None:
    def chosen(
        spec: dict[str, Any], inherited: dict[str, str] | None = None, **world: Any
    ) -> tuple[str | None, str | None]:
        spec = {"world": {"nodes": 2, "ranks_per_node": 2, **world}, **spec}
        env = plans(spec, "cuda", inherited or {})[0].env
        return env["GLOO_SOCKET_IFNAME"], env.get("NCCL_SOCKET_IFNAME")

    assert chosen({}) == ("eth7", "=eth7")
    site = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib1"}  # of the nodes' own environment
    assert chosen({}, site) == ("ib1", "ib0")
    assert chosen({}, site, interface="eth7") == ("eth7", "=eth7")  # asked for by the spec
    assert chosen({"nccl": {"NCCL_SOCKET_IFNAME": "^docker"}}, site, interface="eth7") == ("eth7", "^docker")
    assert chosen({"env": {"NCCL_SOCKET_IFNAME": "a", "GLOO_SOCKET_IFNAME": "b"}}, site) == ("b", "a")
    assert chosen({}, nodes=1) == ("lo", None)


def test_cuda_visible_devices_set_by_engine_is_kept() -> None:
    assert plans({}, "cuda", {"CUDA_VISIBLE_DEVICES": "1,3"})[0].env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in plans({}, "cuda", {})[0].env
    assert plans({}, "cuda", {"CUDA_VISIBLE_DEVICES": "1,3"}, gpus=[0])[0].env["CUDA_VISIBLE_DEVICES"] == "0"
    assert plans({}, "cpu", {"CUDA_VISIBLE_DEVICES": "1,3"})[0].env["CUDA_VISIBLE_DEVICES"] == ""


def test_rank_environment_inherits_path_but_no_credentials() -> None:
    env = plans({})[0].env
    assert env["PATH"] == "/bin" and env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert "RATCHET_DATABASE_URL" not in env and "TOKEN" not in str(env)
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert (env["GLOO_SOCKET_IFNAME"], env["PYTHONUNBUFFERED"]) == ("lo", "1")
    assert plans({}, "cuda", gpus=[2, 5])[0].env["CUDA_VISIBLE_DEVICES"] == "2,5"


def test_nccl_error_handling_is_set_for_scripts_but_not_tasks() -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    script: dict[str, Any] = {"task": None, "script": ["train.py"], "code": {"path": "/code"}}
    assert plans(script)[0].env[name] == "1" and name not in plans({})[0].env
    assert plans(script, inherited={name: "2"})[0].env[name] == "2"
    assert plans({**script, "env": {name: "3"}})[0].env[name] == "3"


def test_spec_env_overrides_defaults_and_secrets_are_resolved() -> None:
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
    crossed = {"secrets": {"A": {"from_env": "B"}, "B": {"from_env": "A"}}}  # a launcher has resolved them
    assert plans(crossed, inherited={"A": "of B", "B": "of A"})[0].env["A"] == "of B"
    with pytest.raises(UserError, match="SOURCE"):
        plans({"secrets": {"KEY": {"from_env": "SOURCE"}}}, inherited={})
    secret = {"secrets": {"KEY": {"from_secret": {"name": "wandb", "key": "token"}}}}
    assert plans(secret, inherited={"KEY": "of the engine"})[0].env["KEY"] == "of the engine"
    with pytest.raises(UserError, match="key token of the Secret wandb"):
        plans(secret, inherited={})


def test_trackers_have_one_run_per_job_unless_the_spec_names_it() -> None:
    inherited = {
        "WANDB_RUN_ID": "of a shell",
        "WANDB_RESUME": "never",
        "MLFLOW_RUN_ID": "of a shell",
        "MLFLOW_TRACKING_URI": "u",
    }
    env = plans({}, inherited=inherited)[1].env
    assert (env["WANDB_RUN_ID"], env["WANDB_RESUME"], env["RATCHET_JOB_ID"]) == ("j", "allow", "j")
    assert env["RATCHET_TENSORBOARD_DIR"] == "/code/tensorboard"  # in the working directory
    assert "MLFLOW_RUN_ID" not in env and env["MLFLOW_TRACKING_URI"] == "u"  # rank 0 finds the run
    given = {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must", "MLFLOW_RUN_ID": "own"}
    assert plans({"env": given}, inherited=inherited)[0].env.items() >= given.items()


def test_determinism_settings_come_from_the_seed() -> None:
    seed = 2**40 + 5
    env = plans({"seed": seed})[0].env
    assert (env["PYTHONHASHSEED"], env["CUBLAS_WORKSPACE_CONFIG"]) == ("5", ":4096:8")
    env = plans({"seed": seed, "determinism": "off"})[0].env
    assert "PYTHONHASHSEED" not in env and "CUBLAS_WORKSPACE_CONFIG" not in env
