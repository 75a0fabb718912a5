"""What every launcher does, on every engine that runs here: local processes, Slurm, another package's launcher, and Kubernetes,
which is modelled (``tests/support/kube``), since no cluster can run here; its pods are processes. Agents are real, ranks not.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_service.launchers.base import AttemptRef, AttemptState, Launcher, LaunchPlan
from tests.support.engines import ENGINES, Engine, running_engine
from tests.support.fake_report_service import TOKEN
from tests.support.server import processes_below, wait_for

SECRET = "the-value-of-a-secret"
GRACE = 30.0
PATIENCE = 60.0


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_OF_A_KEY", SECRET)
        with running_engine(request.param, directory) as made:
            yield made
    wait_for(lambda: not processes_below(directory), "the engine's processes to go", PATIENCE)


def begun(launcher: Launcher, ref: AttemptRef) -> AttemptState:
    """Its state once every agent has begun and, with a rank, its result of a step."""

    def look() -> AttemptState | None:
        state = launcher.poll(ref)
        assert state.alive or state.results, launcher.logs(ref, 4000)
        return state if all(node.seen for node in state.nodes) else None

    return wait_for(look, f"the agents of {ref.name}", PATIENCE)


def over(launcher: Launcher, ref: AttemptRef) -> AttemptState:
    def look() -> AttemptState | None:
        state = launcher.poll(ref)
        return None if state.alive else state

    try:
        return wait_for(look, f"{ref.name} to be over", PATIENCE)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{launcher.poll(ref)}\n{launcher.logs(ref, 4000)}") from None


def started(engine: Engine, launcher: Launcher, launch: LaunchFile) -> LaunchPlan:
    plan = launcher.plan(launch)
    launcher.submit(plan)
    return plan


def stepping(plan: LaunchPlan) -> bool:
    """Every rank has begun its first step."""
    paths = plan.ref.paths
    return all(paths.counter(rank).exists() for rank in range(plan.launch.world_size))


def test_launcher_plan_has_no_side_effects_and_shows_no_secret(engine: Engine) -> None:
    launch = engine.launch(secrets={"KEY": {"from_env": "SOURCE_OF_A_KEY"}})
    before = sorted(engine.home.home.rglob("*"))
    one, two = (engine.launcher().plan(launch) for _ in range(2))
    assert one == two
    assert sorted(engine.home.home.rglob("*")) == before
    text = json.dumps(one.printable())
    assert SECRET not in text and TOKEN not in text
    assert one.ref.name in text and "KEY" in text and launch.attempt_dir in text
    assert SECRET not in repr(one)


def test_launcher_starts_an_attempt_once_and_stops_with_a_result(engine: Engine) -> None:
    launch = engine.launch(secrets={"KEY": {"from_env": "SOURCE_OF_A_KEY"}})
    first, second, third = (engine.launcher() for _ in range(3))
    ref = first.plan(launch).ref
    state = first.poll(ref)
    assert (state.alive, state.seen, state.results, state.ends) == (False, False, (), ())
    plan = started(engine, first, launch)
    assert first.poll(ref).alive, "what was submitted is alive before its agent has begun"
    started(engine, second, launch)
    state = begun(second, ref)
    assert state.ends == () and state.waiting is None
    wait_for(lambda: stepping(plan), "the rank to begin", PATIENCE)
    started(engine, third, launch)
    assert engine.group_count(ref) == 1
    (agent,) = engine.agents(plan)
    assert f"KEY={SECRET}".encode() in Path(f"/proc/{agent}/environ").read_bytes().split(b"\0")
    assert plan.ref.paths.launch_file.stat().st_mode & 0o777 == 0o600
    third.stop(ref, GRACE)
    state = over(third, ref)
    assert [result.cause for result in state.results] == [Cause.SIGTERM]
    wait_for(lambda: first.kill(ref) == [], "it to be proved dead", PATIENCE)
    assert not first.poll(ref).alive
    assert "run before" not in third.logs(ref, 4000)


def test_completed_attempt_has_one_result_per_node_and_no_engine_end(engine: Engine) -> None:
    engine.start_rendezvous_service()
    launcher = engine.launcher()
    # Stand-ins do not wait for one another: each takes longer than the others' agents need to hear of it.
    stand_in = {"steps": 60, "pause": 0.02} if engine.nodes > 1 else {"steps": 20}
    plan = started(engine, launcher, engine.launch(stand_in, world={"nodes": engine.nodes}))
    state = over(launcher, plan.ref)
    assert [result.cause for result in state.results] == [Cause.COMPLETED] * engine.nodes, launcher.logs(plan.ref, 4000)
    assert [result.node for result in state.results] == list(range(engine.nodes))
    assert state.ends == ()
    wait_for(lambda: launcher.kill(plan.ref) == [], "it to be proved dead", PATIENCE)


def test_killed_agent_is_reported_lost_without_a_result(engine: Engine) -> None:
    launcher = engine.launcher()
    plan = started(engine, launcher, engine.launch())
    begun(launcher, plan.ref)
    wait_for(lambda: stepping(plan), "the rank to begin", PATIENCE)
    (agent,) = engine.agents(plan)
    os.kill(agent, signal.SIGKILL)
    state = over(launcher, plan.ref)
    assert state.seen and state.results == () and state.lost == (0,)
    assert all(end.cause is Cause.UNKNOWN for end in state.ends), "nobody but the agent itself is to blame"
    wait_for(lambda: launcher.kill(plan.ref) == [], "the rest to be proved dead", PATIENCE)
    wait_for(lambda: not processes_below(plan.ref.paths.root), "its ranks to be dead", PATIENCE)


def test_launcher_logs_explain_why_an_agent_could_not_start(engine: Engine) -> None:
    launcher = engine.launcher()
    plan = started(engine, launcher, engine.launch().model_copy(update={"protocol": 99}))
    state = over(launcher, plan.ref)
    assert [result.cause for result in state.results] == [Cause.UPGRADE]
    wait_for(lambda: "the service uses 99" in launcher.logs(plan.ref, 4000), "the agent's words", PATIENCE)
    assert len(launcher.logs(plan.ref, 30)) <= 30


def test_sweep_ends_only_orphaned_attempts_and_kill_ends_grandchildren(engine: Engine) -> None:
    other = HomePaths(engine.directory / "other")
    other.jobs.mkdir(parents=True)
    ours, theirs = engine.launcher(), engine.launcher(other)
    known, orphan = (started(engine, ours, engine.launch({"child": "session"})) for _ in range(2))
    foreign = started(engine, theirs, engine.launch(home=other))
    for launcher, plan in ((ours, known), (ours, orphan), (theirs, foreign)):
        begun(launcher, plan.ref)
        wait_for(lambda plan=plan: stepping(plan), "the rank to begin", PATIENCE)  # type: ignore[misc]
    asked: list[str] = []

    def rows(names: Collection[str]) -> list[str]:
        asked.extend(names)
        return [name for name in names if name != orphan.ref.name]

    assert engine.launcher().sweep(rows) == [orphan.ref.name]
    assert {known.ref.name, orphan.ref.name} <= set(asked) and foreign.ref.name not in asked
    wait_for(lambda: not processes_below(orphan.ref.paths.root), "the orphan's processes to go", PATIENCE)
    for launcher, plan in ((ours, known), (theirs, foreign)):
        assert launcher.poll(plan.ref).alive and len(engine.agents(plan)) == 1
        assert launcher.kill(plan.ref), "it is named what is ended"
        wait_for(lambda launcher=launcher, plan=plan: launcher.kill(plan.ref) == [], "it to be dead", PATIENCE)  # type: ignore[misc]
        assert not processes_below(plan.ref.paths.root)
        state = launcher.poll(plan.ref)
        assert not state.alive
        assert state.lost == (0,) or [r.cause for r in state.results] == [Cause.SIGTERM], "an engine may ask first"
