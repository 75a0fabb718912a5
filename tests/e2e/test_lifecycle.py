"""Everything that may be asked of a job, and much of what may happen to it, through the real service: each time it does what was
asked, says why, loses nothing, and ends like a run that nobody touched.

The task's model takes another path from its eighth step on, so that the order in which gradients become ready changes while
PowerSGD compresses several buckets.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.paths import AttemptPaths
from ratchet_store.read.compare import compare, render
from tests.e2e.exactness import final_checkpoint, run_undisturbed
from tests.support.full_matrix import full
from tests.support.launch import wait_freeze
from tests.support.server import Server, processes_below, rank_pid, wait_for, wait_for_checkpoint
from tests.support.user_projects import make_project

STEPS, EVALUATE_EVERY = 30, 6
TURNING = """
import torch
from torch import nn

from mine import Mine, Numbers
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.task import Parts


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 48), nn.Linear(48, 2)
        self.middle = nn.ModuleList(nn.Linear(48, 48) for _ in range(5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        turned = int(self.calls) >= 8
        self.calls += self.training
        x = torch.relu(self.first(x))
        for layer in reversed(self.middle) if turned else self.middle:
            x = x + torch.relu(layer(x))
        return self.last(x)


class Diverging(Mine):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("nan")


class Turning(Mine):
    def __init__(self, num_workers=0, **more):
        super().__init__(**more)
        self.num_workers = num_workers

    def build(self, ctx):
        self.rank = ctx.rank
        self.wait("build")
        model = Net()
        data = TrainLoader(Numbers(100), batch_size=8, seed=ctx.seed, rank=ctx.rank, world_size=ctx.world_size,
                           num_workers=self.num_workers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return Parts(model, optimizer, data, total_steps=self.steps, evaluate_every=self.evaluate_every)
"""
LEAVING = """
import sys

import torch

from mine import Numbers, net
from ratchet_worker.data.loader import TrainLoader
from ratchet_worker.session import Session

with Session() as s:
    data = TrainLoader(Numbers(100), batch_size=8, seed=s.seed, rank=s.rank, world_size=s.world_size)
    module = net()
    model = s.wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    s.register(optimizer=optimizer, data=data)
    batches = s.batches()
    for step in s.steps(20):
        x, y = next(batches)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 6:
            sys.exit(0)
"""


class Gate:
    """Places of the task where all ranks wait (``build``, ``step9``, ``batch``)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def hold(self, *places: str) -> None:
        for place in places:
            (self.directory / place).touch()
            for trace in self.directory.glob(f"{place}.reached.*"):
                trace.unlink()

    def reached(self, place: str) -> None:
        traces = [self.directory / f"{place}.reached.{rank}" for rank in range(2)]
        wait_for(lambda: all(t.exists() for t in traces), f"both ranks to be at {place}", 60)

    def release(self, *places: str) -> None:
        for place in places:
            (self.directory / place).unlink()


@dataclass
class World:
    """The service, the user's project, and the run that nobody touched."""

    server: Server
    project: Path
    reference: Path = Path()
    reference_id: str = ""

    def spec(self, name: str, gate: Gate | None = None, **more: Any) -> dict[str, Any]:
        arguments = {
            "steps": STEPS,
            "evaluate_every": EVALUATE_EVERY,
            "gate": str(gate.directory) if gate is not None else None,
        }
        return {
            "name": name,
            "code": {"path": str(self.project)},
            "task": {"entrypoint": "turning:Turning", "args": arguments},
            "world": {"ranks_per_node": 2, "device": "cpu"},
            "resources": {"cpus_per_rank": 1},
            "ddp": {"bucket_cap_mb": 0.01},
            "hook": {"name": "powerSGD", "matrix_approximation_rank": 1, "start_powerSGD_iter": 4},
            "checkpoint": {"every_steps": 5, "keep_last": 9},
            "seed": 3,
        } | more

    def newest(self, job_id: str) -> AttemptPaths:
        found = self.server.newest_attempt(job_id)
        assert found is not None
        return found[1]

    def act(self, job_id: str, action: str, **body: Any) -> dict[str, Any]:
        return dict(self.server.call("POST", f"/v1/jobs/{job_id}/{action}", json=body).json())

    def act_when_held(self, job_id: str, action: str, number: int = 0) -> None:
        """Returns once every rank has published where it is in freeze ``number`` of the attempt."""
        self.act(job_id, action)
        wait_freeze(self.newest(job_id), number)

    def checkpoints(self, job_id: str) -> dict[str, str]:
        items = self.server.call("GET", f"/v1/jobs/{job_id}/checkpoints?limit=100").json()["items"]
        return {item["id"]: item["state"] for item in items}

    def verify(self, job_id: str, checkpoint: str) -> str:
        return str(
            self.server.call("POST", f"/v1/jobs/{job_id}/checkpoints/{checkpoint}/verify").json()["verification"]
        )

    def metrics(self, job_id: str) -> dict[str, list[tuple[int, float | str]]]:
        series = self.server.call("GET", f"/v1/jobs/{job_id}/metrics").json()["series"]
        return {s["name"]: [(p["step"], p["value"]) for p in s["points"]] for s in series}

    def assert_like_the_reference(self, job_id: str) -> None:
        self.server.wait_phase(job_id, "SUCCEEDED")
        comparison = compare(self.reference, final_checkpoint(self.server, job_id))
        assert comparison.identical and len(comparison.tensors) > 50, render(comparison)
        assert self.metrics(job_id) == self.metrics(self.reference_id)
        attempts = self.server.attempts(job_id)
        verdicts = {(a["resume_report"] or {}).get("verdict") for a in attempts}
        assert verdicts <= {"fresh", "exact", None}
        assert [a["redone"]["first_difference"] for a in attempts] == [None] * len(attempts)
        steps = attempts[-1]["redone"]["steps"]
        proved = f"proved ({steps} of {steps} redone steps)"
        assert attempts[-1]["proof"].endswith(proved if steps else ("fresh", "no step compared")), attempts[-1][
            "redone"
        ]
        started = [e for e in self.server.events(job_id) if e["type"] == "rank-started"]
        assert len({(e["attempt"], e["data"]["rank"]) for e in started}) == len(started), "an attempt ran twice"


@pytest.fixture(scope="module")
def world(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    project = make_project(tmp_path_factory.mktemp("user") / "project")
    (project / "turning.py").write_text(TURNING)
    (project / "leaving.py").write_text(LEAVING)
    made = World(server, project)
    made.reference = run_undisturbed(server, made.spec("reference"))
    made.reference_id = made.reference.parents[1].name
    yield made


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@full
@pytest.mark.slow
def test_stopped_damaged_and_rewound_job_ends_like_the_undisturbed_run(world: World, tmp_path: Path) -> None:
    server, gate = world.server, Gate(tmp_path / "gate")
    gate.hold("build", "step9", "step11")
    job = server.submit(world.spec("life", gate))

    gate.reached("build")  # cancelled while it starts, then taken up again under the same id
    world.act(job, "cancel")
    server.wait_phase(job, "CANCELLED")
    gate.release("build")
    assert world.act(job, "resume")["budgets"]["attempts_without_progress"] == 0

    gate.reached("step9")
    world.act_when_held(job, "checkpoint")
    gate.release("step9")
    gate.reached("step11")
    world.act_when_held(job, "suspend", number=1)
    gate.release("step11")
    suspended = server.wait_phase(job, "SUSPENDED")
    assert suspended["last_checkpoint"] == "step-000000000011.a0002"
    assert "step-000000000009.a0002" in world.checkpoints(job)

    flip_a_bit(server.paths.job(job).checkpoint(11, 2) / "rank-00001-of-00002.safetensors")
    assert world.verify(job, "step-000000000010.a0002") == "ok"
    gate.hold("step14")
    world.act(job, "resume")
    gate.reached("step14")
    wait_for(lambda: server.job(job)["phase"] == "RUNNING", "its first report")
    assert world.checkpoints(job)["step-000000000011.a0002"] == "quarantined"
    gate.hold("batch")
    world.act_when_held(job, "preempt")
    gate.release("step14")

    gate.reached("batch")  # in the evaluation after step 18
    world.act_when_held(job, "cancel")
    gate.release("batch")
    server.wait_phase(job, "CANCELLED")

    gate.hold("step19")  # back to step 14, and killed there before the new branch has a checkpoint of its own
    world.act(job, "resume", from_step=14)
    gate.reached("step19")
    wait_for_checkpoint(world.newest(job), 15)
    os.kill(rank_pid(world.newest(job), 1), signal.SIGKILL)
    wait_for(lambda: len(server.attempts(job)) == 6, "the attempt after the kill")
    gate.release("step19")
    world.assert_like_the_reference(job)
    attempts = server.attempts(job)
    assert [a["cause"] for a in attempts] == [
        "api-cancel", "api-suspend", "api-preempt", "api-cancel", "rank-killed", "completed",
    ]  # fmt: skip
    assert [a["base"] and (a["base"]["step"], a["base"]["attempt"]) for a in attempts[:5]] == [
        None, (0, None), (10, 2), (14, 3), (14, 3),
    ]  # fmt: skip
    assert (attempts[5]["base"]["step"], attempts[5]["base"]["attempt"]) == (15, 5)
    assert attempts[2]["resume_report"]["quarantined"]
    types = [e["type"] for e in server.events(job)]
    assert "checkpoint-quarantined" in types
    assert "note.checkpoint-not-needed" not in types, "a request of one attempt was served again in the next"


@pytest.mark.slow
def test_hung_rank_and_three_service_kills_lose_no_job(world: World, tmp_path: Path) -> None:
    server, gate = world.server, Gate(tmp_path / "gate")
    gate.hold("step8")
    job = server.submit(world.spec("outages", gate, policy={"step_deadline": 15, "backoff": 2}))

    gate.reached("step8")
    os.kill(rank_pid(world.newest(job), 1), signal.SIGSTOP)
    gate.release("step8")
    hung = wait_for(lambda: (a := server.attempts(job)[0])["phase"] == "ENDED" and a, "the hang to be told")
    assert (hung["cause"], hung["rank"]) == ("hang", 1)
    assert "SIGSTOP" in hung["message"]
    waiting = server.job(job)
    assert (waiting["phase"], waiting["reason"]) == ("QUEUED", "backoff")
    server.kill()  # while it waits
    gate.hold("step9")
    server.start()
    assert server.job(job)["not_before"] in (waiting["not_before"], None)

    gate.reached("step9")
    server.kill()  # while it runs, and a rank dies meanwhile
    os.kill(rank_pid(world.newest(job), 0), signal.SIGKILL)
    wait_for(world.newest(job).result_file.exists, "the agent's result")
    gate.release("step9")
    gate.hold("step13")
    server.start()

    gate.reached("step13")
    world.act_when_held(job, "preempt")
    assert server.job(job)["phase"] == "STOPPING"
    server.kill()  # while it stops
    gate.release("step13")
    wait_for(world.newest(job).result_file.exists, "the agent's result")
    server.start()
    world.assert_like_the_reference(job)
    attempts = server.attempts(job)
    assert [a["cause"] for a in attempts] == ["hang", "rank-killed", "api-preempt", "completed"]
    assert [a["steps_lost"] for a in attempts[2:]] == [0, 0]
    # The steps since a save that was committed, and those that were done while the next was being written.
    assert all(a["steps_lost"] <= 2 * 5 for a in attempts), attempts
    assert sum(a["steps_done"] for a in attempts) == STEPS + sum(a["steps_lost"] for a in attempts)


@pytest.mark.slow
def test_signal_to_every_process_at_once_is_one_agreed_stop(world: World, tmp_path: Path) -> None:
    """Agent, ranks and the workers that load their data, in all their process groups. Who loads the data makes no difference."""
    server, gate = world.server, Gate(tmp_path / "gate")
    gate.hold("step12")
    spec = world.spec("workers", gate)
    spec["task"]["args"] |= {"num_workers": 1}
    job = server.submit(spec)
    gate.reached("step12")
    paths = world.newest(job)
    assert server.process is not None
    members = [pid for pid in processes_below(paths.root) if pid != server.process.pid]
    groups = {os.getpgid(pid) for pid in members}
    assert len(groups) == 3 and len(members) >= 5 and os.getpgid(0) not in groups
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
    wait_freeze(paths, 0)
    gate.release("step12")
    world.assert_like_the_reference(job)
    stopped, resumed = server.attempts(job)
    assert (stopped["cause"], stopped["steps_lost"]) == ("sigterm", 0)
    assert stopped["committed_step"] == stopped["last_step"] >= 10
    assert resumed["resume_report"]["verdict"] == "exact"


@pytest.mark.slow
@pytest.mark.parametrize(("first", "base"), [("auto", 1), pytest.param("off", 0, marks=full)])
def test_kills_in_first_interval_do_not_end_a_job_below_max_failures(
    world: World, tmp_path: Path, first: str, base: int
) -> None:
    server, gate = world.server, Gate(tmp_path / "gate")
    checkpoint = {"every_steps": 10, "first": first}
    policy = {"max_failures": 20, "backoff": 0.01}
    gate.hold("step4")
    job = server.submit(world.spec(f"killed-{first}", gate, checkpoint=checkpoint, policy=policy))
    for number in range(1, 5):
        gate.hold("step4")
        gate.reached("step4")
        if base:
            wait_for(lambda: world.checkpoints(job), "the first save")
        os.kill(rank_pid(world.newest(job), 1), signal.SIGKILL)
        wait_for(lambda n=number: len(server.attempts(job)) == n + 1, "the next attempt")  # type: ignore[misc]
    gate.release("step4")
    server.wait_phase(job, "SUCCEEDED")
    attempts = server.attempts(job)
    assert [a["cause"] for a in attempts] == ["rank-killed"] * 4 + ["completed"]
    assert [a["base"]["step"] for a in attempts] == [0, base, base, base, base]
    assert {a["resume_report"]["verdict"] for a in attempts[1:]} == {"exact" if base else "fresh"}
    assert attempts[-1]["redone"]["steps"] == 3 - base
    world.assert_like_the_reference(job)
    assert not any(name.startswith("step-000000000001.") for name in world.checkpoints(job))


@pytest.mark.slow
def test_run_with_nan_loss_is_displayed_saved_and_resumed(world: World, tmp_path: Path) -> None:
    """Loss and residuals are NaN, which JSON cannot represent."""
    server, gate = world.server, Gate(tmp_path / "gate")
    gate.hold("step12")
    spec = world.spec("diverging", gate)
    spec["task"] = {"entrypoint": "turning:Diverging", "args": {"steps": 14, "gate": str(gate.directory)}}
    job = server.submit(spec)
    gate.reached("step12")
    wait_for_checkpoint(world.newest(job), 10)
    os.kill(rank_pid(world.newest(job), 1), signal.SIGKILL)
    gate.release("step12")
    server.wait_phase(job, "SUCCEEDED")
    _, resumed = server.attempts(job)
    assert (resumed["base"]["step"], resumed["resume_report"]["verdict"]) == (10, "exact")
    assert {value for _, value in world.metrics(job)["loss"]} == {"NaN"}
    hook = server.call("GET", f"/v1/jobs/{job}/hook").json()
    assert (hook["phase"], hook["residual_norm"]) == ("compressing", {"0": "NaN", "1": "NaN"})
    newest = server.job(job)["last_checkpoint"]
    assert world.verify(job, newest) == "ok"
    manifest = server.call("GET", f"/v1/jobs/{job}/checkpoints/{newest}").json()["manifest"]
    assert [summary["residual_norm"] for summary in manifest["hook_summaries"]] == ["NaN", "NaN"]


@pytest.mark.slow
def test_forks_keep_parent_unchanged_and_exit_in_the_loop_is_a_failure(world: World) -> None:
    server, parent = world.server, world.reference_id
    before = world.checkpoints(parent)
    source = {"checkpoint_id": "step-000000000020.a0001"}
    longer = world.act(parent, "fork", **source, name="longer", spec={"task": {"args": {"steps": STEPS + 5}}})["id"]
    refused = server.call("POST", f"/v1/jobs/{parent}/fork", json={}, expect=409).json()
    assert refused["code"] == "nothing-left"
    pointless = world.act(parent, "fork", name="pointless", spec={"env": {"MAY": "matter"}})["id"]
    leaving = world.spec("leaving", script=["leaving.py"], policy={"max_failures": 0})
    leaving["world"] = {"ranks_per_node": 1, "device": "cpu"}
    del leaving["task"]
    exits = server.submit(leaving)
    refused = server.call(
        "POST", f"/v1/jobs/{parent}/fork", json={"spec": {"world": {"ranks_per_node": 3}}}, expect=422
    ).json()
    assert refused["errors"][0]["pointer"] == "/spec/world/ranks_per_node"

    ended = {name: wait_for(lambda i=i: _over(server, i), f"{name} to end", 90) for name, i in
             {"longer": longer, "pointless": pointless, "exits": exits}.items()}  # fmt: skip
    assert {name: job["phase"] for name, job in ended.items()} == {
        "longer": "SUCCEEDED", "pointless": "FAILED", "exits": "FAILED",
    }  # fmt: skip
    assert final_checkpoint(server, longer).name == f"step-{STEPS + 5:012d}.a0001"
    (attempt,) = server.attempts(longer)
    assert attempt["base"]["step"] == 20
    assert [d["key"] for d in attempt["resume_report"]["differences"]] == ["spec:task.args.steps", "total_steps"]
    assert "nothing left to train" in ended["pointless"]["message"]
    assert f"`ratchet fork {parent} --checkpoint ID`" in ended["pointless"]["message"]
    assert "sys.exit" in ended["exits"]["message"]
    assert world.checkpoints(parent) == before
    assert server.job(parent)["phase"] == "SUCCEEDED"


def _over(server: Server, job_id: str) -> dict[str, Any] | None:
    job = server.job(job_id)
    return job if job["phase"] in ("SUCCEEDED", "FAILED", "CANCELLED") else None
