"""Whole attempts of a task on two real ranks: stopped, killed, damaged on disk, resumed; bit for bit the undisturbed run."""

from __future__ import annotations

import os
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ratchet_contract.api.views import EnvironmentView
from ratchet_contract.exit_codes import EXIT_PREEMPTED, EXIT_USER_ERROR
from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import ForkSource
from ratchet_store.read.checkpoint_reader import CheckpointReader
from ratchet_store.read.compare import compare, render
from tests.support import gated_task
from tests.support.doctor import NOTHING_TESTED
from tests.support.launch import RESOLVED, Attempt, Job

STEPS, EVERY = 60, 10
HOOK = {"name": "powerSGD", "matrix_approximation_rank": 2, "start_powerSGD_iter": 5}

STREAM = """
import torch

from ratchet_worker.data.iterable import TrainStream
from ratchet_worker.session import Session
from ratchet_worker.tasks.digits import make_net

with Session() as s:
    module = make_net(8, 0.25)
    s.wrap(module)
    s.register(optimizer=torch.optim.SGD(module.parameters()), data=TrainStream([]))
    s.restore()
"""

SEEN = """
import os

import numpy

os.environ["TORCH_COMPILE_DISABLE"] = "1"

from ratchet_worker.tasks.digits import DigitsTask


class Seen(DigitsTask):
    def __init__(self, dump=None, **more):
        super().__init__(**more)
        self.dump = dump

    def build(self, context):
        from torch._dynamo import config

        assert config.disable  # torch reads the variable once; nothing may have had it do so before this module
        return super().build(context)

    def before_step(self, model, optimizer, step):
        if self.dump is not None:
            found = {f"model/{name}": p.detach().numpy() for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                found[f"optimizer/{name}/momentum_buffer"] = optimizer.state[p]["momentum_buffer"].numpy()
            numpy.savez(self.dump, **found)
            self.dump = None
"""


def _spec(**args: Any) -> dict[str, Any]:
    return {
        "task": {
            "entrypoint": "ratchet_worker.tasks.digits:DigitsTask",
            "args": {"steps": STEPS, "width": 8, **args},
        },
        "hook": HOOK,
        "ddp": {"bucket_cap_mb": 0.02},
        "checkpoint": {"every_steps": EVERY, "keep_last": 2},
    }


class Gate:
    """A task that does not come to its end before the test has stopped or killed it, however late that is: rank 0 waits before a
    step, and the others for its gradients."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        gated_task.write_task(root)

    def spec(self, **args: Any) -> dict[str, Any]:
        spec = _spec(gates=str(self.root), **args)
        return {**spec, "task": {**spec["task"], "entrypoint": gated_task.ENTRYPOINT}, "code": {"path": str(self.root)}}

    def hold(self, step: int) -> None:
        (self.root / f"{step}.0").touch()

    def let_go(self, step: int) -> None:
        (self.root / f"{step}.0").unlink()


def _steps(job: Job) -> list[int]:
    return [int(name.split("-")[1].split(".")[0]) for name in job.checkpoints()]


def _statuses(attempt: Attempt) -> dict[str, str]:
    return {c.component: c.status for c in attempt.report().components if c.rank == 0}


def test_stopped_killed_and_damaged_job_ends_like_the_undisturbed_run(tmp_path: Path, jobs: list[Job]) -> None:
    gate = Gate(tmp_path / "gate")
    whole = Job(tmp_path, gate.spec(), gate.root, job_id="whole")
    cut = Job(tmp_path, gate.spec(num_workers=1), gate.root, job_id="cut")
    jobs += [whole, cut]
    attempt = whole.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    assert _steps(whole) == [50, 60]
    assert [m.step for m in attempt.messages(kind="checkpoint_deleted")] == [1, 10, 20, 30, 40]
    assert CheckpointReader(whole.newest()).manifest.finished

    # SIGTERM to one rank's whole process group, its DataLoader worker included.
    gate.hold(16)
    attempt = cut.launch()
    attempt.wait_step(14)
    os.killpg(attempt.pid(1), signal.SIGTERM)
    attempt.wait_freeze(0)
    gate.let_go(16)
    result = attempt.wait()
    assert (result.cause, result.exit_code) == (Cause.SIGTERM, EXIT_PREEMPTED), attempt.logs()
    stopped_at = result.last_step
    assert 14 <= stopped_at < STEPS and _steps(cut)[-1] == stopped_at

    # The stop's checkpoint is damaged on disk: found, put aside, told; the one before it takes its place.
    broken = cut.newest() / "rank-00001-of-00002.safetensors"
    data = bytearray(broken.read_bytes())
    data[-1] ^= 1
    broken.write_bytes(data)
    fallback = stopped_at // EVERY * EVERY if stopped_at % EVERY else stopped_at - EVERY
    gate.hold(fallback + 14)
    attempt = cut.launch()
    attempt.wait_step(fallback + 12)
    attempt.kill(0)
    result = attempt.wait()
    gate.let_go(fallback + 14)
    assert result.cause is Cause.RANK_KILLED
    report = attempt.report()
    assert (report.base.step, report.verdict, len(report.quarantined)) == (fallback, "exact", 1)
    assert "digest" in report.quarantined[0]
    assert [m.step for m in attempt.messages(kind="quarantined")] == [stopped_at]

    attempt = cut.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    report = attempt.report()
    assert report.verdict == "exact" and report.base.step >= fallback + 10 and report.base.attempt == 2
    comparison = compare(whole.newest(), cut.newest())
    assert comparison.identical, render(comparison)
    assert {c.component for c in comparison.components} == {"model", "optimizer", "buffers", "hook", "rng"}
    assert whole.attempts[0].metrics()[STEPS] == attempt.metrics()[STEPS]

    # Relaunched, a finished job evaluates once more and ends: no step, no checkpoint.
    before = cut.checkpoints()
    attempt = cut.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    reading = attempt.reading()
    assert reading is not None and reading.started == 0 and cut.checkpoints() == before
    assert attempt.metrics() == {STEPS: {k: v for k, v in whole.attempts[0].metrics()[STEPS].items() if "test" in k}}


def test_untested_torch_and_editable_packages_are_noted_next_to_the_verdict(tmp_path: Path, jobs: list[Job]) -> None:
    """Strict determinism does not refuse them either."""
    gate = Gate(tmp_path / "gate")
    (gate.root / "edited-1.0.dist-info").mkdir()
    (gate.root / "edited-1.0.dist-info" / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    (gate.root / "untested.py").write_text(f"{NOTHING_TESTED}from gated import Gated\n")
    spec = gate.spec(evaluate=False)
    job = Job(
        tmp_path,
        {**spec, "task": {**spec["task"], "entrypoint": "untested:Gated"}, "determinism": "strict"},
        gate.root,
    )
    jobs.append(job)
    gate.hold(14)
    attempt = job.launch()
    attempt.wait_step(12)
    attempt.kill(1)
    attempt.wait()
    gate.let_go(14)
    again = job.launch()
    assert again.wait().cause is Cause.COMPLETED, again.logs()
    for report, verdict in ((attempt.report(), "fresh"), (again.report(), "exact")):
        assert report.verdict == verdict
        untested, edited = report.notes
        assert f"torch {torch.__version__} is not tested with this Ratchet" in untested
        assert edited == "installed as editable, so whether their code is the same is not checked: edited"


def test_resume_with_differences_is_refused_reported_or_redistributed(tmp_path: Path, jobs: list[Job]) -> None:
    gate = Gate(tmp_path / "gate")
    lib = gate.root / "Some_Lib-1.0.dist-info"
    lib.mkdir()
    job = Job(tmp_path, {**gate.spec(evaluate=False), "determinism": "strict"}, gate.root)
    jobs.append(job)
    gate.hold(14)
    attempt = job.launch()
    attempt.wait_step(12)
    attempt.kill(1)
    attempt.wait()
    source = CheckpointReader(job.newest()).manifest
    packages = str(source.environment["provenance:packages"]).split()
    assert "some-lib==1.0" in packages and f"torch=={version('torch')}" in packages
    told = EnvironmentView.model_validate_json(attempt.paths.environment_file.read_bytes())
    assert told.packages == packages and told.digest == source.environment["packages"]

    lib.rename(gate.root / "Some_Lib-2.0.dist-info")
    (gate.root / "other-3.dist-info").mkdir()
    attempt = job.launch(resolved=RESOLVED.model_copy(update={"threads_per_rank": 2}))
    result = attempt.wait()
    assert (result.cause, result.exit_code) == (Cause.USER_ERROR, EXIT_USER_ERROR)
    assert "threads (1 -> 2)" in (result.message or "") and "--set determinism=warn`" in (result.message or "")
    assert "recorded: package:other (None -> 3), package:some-lib (1.0 -> 2.0), threads" in (result.message or "")

    fork = ForkSource(job_root=str(job.paths.root), step=source.step, attempt=source.attempt, digest=source.digest)
    alone = {**_spec(evaluate=False), "world": {"ranks_per_node": 1, "device": "cpu"}}
    forked = Job(tmp_path, alone, job_id="forked")
    jobs.append(forked)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "stream.py").write_text(STREAM)
    script = {**alone, "task": None, "script": ["stream.py"], "code": {"path": str(tmp_path / "code")}}
    streaming = Job(tmp_path, script, tmp_path / "code", job_id="streaming")
    jobs.append(streaming)
    for attempt, words in (
        (forked.launch(fork=fork, spec={"hook": {**HOOK, "matrix_approximation_rank": 4}}), "rank 2 -> 4"),
        (streaming.launch(fork=fork), "2 ranks, this group has 1: the hook's state and the data position"),
    ):
        result = attempt.wait()
        assert result.cause is Cause.USER_ERROR and words in (result.message or ""), attempt.logs()
        assert "policy.on_hook_mismatch" in (result.message or "")

    attempt = forked.launch(fork=fork, spec={"hook": HOOK, "policy": {"on_hook_mismatch": "redistribute"}})
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    report = attempt.report()
    assert report.verdict == "not-exact" and report.recorded_world_size == 2 and report.base.step == source.step
    assert _statuses(attempt) == {
        "model": "exact", "optimizer": "exact", "layout": "exact", "scheduler": "redistributed", "rng": "reset",
        "buffers": "redistributed", "data": "redistributed", "hook": "redistributed",
    }  # fmt: skip
    spec = {"spec:determinism", "spec:task.entrypoint", "spec:task.args.gates", "spec:code.path"}
    facts = {"determinism", "ranks_per_node", "world_size", *spec}
    assert {d.key for d in report.differences} == {*facts, "package:some-lib"}  # which lies beside the code
    manifest = CheckpointReader(forked.newest()).manifest
    assert manifest.step == STEPS and manifest.world_size == 1
    attempt = forked.launch(spec={"hook": HOOK, "policy": {"on_hook_mismatch": "redistribute"}})
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    report = attempt.report()
    assert (report.verdict, report.base.step) == ("exact", STEPS), report
    since = f"the resume from step {source.step}, attempt {source.attempt}"
    assert f"not exact since {since}: the checkpoint itself has other bits" in report.notes, report.notes

    # Other buckets under `reset`: the hook starts anew, as was asked, and the report says so.
    anew = Job(tmp_path, {**_spec(evaluate=False, steps=source.step + 2), "ddp": {"bucket_cap_mb": 1}}, job_id="anew")
    jobs.append(anew)
    attempt = anew.launch(fork=fork, spec={"policy": {"on_hook_mismatch": "reset"}})
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    statuses = _statuses(attempt)
    assert (statuses["hook"], statuses["layout"], statuses["optimizer"]) == ("reset", "redistributed", "exact")


def test_different_replicas_are_averaged_for_other_ranks_or_another_hook(tmp_path: Path, jobs: list[Job]) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "seen.py").write_text(SEEN)
    local = {"name": "post_localSGD", "start_localSGD_iter": 1, "subgroup_size": 1, "model_averaging_period": 50}
    arguments = {"steps": 4, "width": 4, "evaluate": False}

    def spec(**changes: Any) -> dict[str, Any]:
        task = {"entrypoint": "seen:Seen", "args": {**arguments, **changes.pop("args", {})}}
        return {
            **_spec(),
            "code": {"path": str(tmp_path / "code")},
            "task": task,
            "hook": local,
            "determinism": "off",
            **changes,
        }

    job = Job(tmp_path, spec(), tmp_path / "code", job_id="apart")
    jobs.append(job)
    attempt = job.launch()
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    reader = CheckpointReader(job.newest())
    stored = {name: t for name, t in reader.tensors("rank/").items() if t.dtype == "F32"}
    saved = {name: np.frombuffer(t.data, np.float32).reshape(t.shape) for name, t in stored.items()}
    source = reader.manifest
    assert source.replicas == "subgroup"

    fork = ForkSource(job_root=str(job.paths.root), step=source.step, attempt=source.attempt, digest=source.digest)
    dump = str(tmp_path / "seen.npz")
    changed = spec(
        args={"steps": 5, "dump": dump}, world={"ranks_per_node": 1, "device": "cpu"}, hook={"name": "fp16_compress"},
        policy={"on_hook_mismatch": "reset"},
    )  # fmt: skip
    alone = Job(tmp_path, changed, tmp_path / "code", job_id="together")
    jobs.append(alone)
    attempt = alone.launch(fork=fork)
    assert attempt.wait().cause is Cause.COMPLETED, attempt.logs()
    told = {c.component: (c.status, c.reason or "") for c in attempt.report().components}
    for component in ("model", "optimizer"):
        assert told[component] == ("redistributed", "the mean over 2 ranks, whose replicas differed")
    assert told["hook"][0] == "reset" and "post_localSGD -> fp16_compress" in told["hook"][1]
    assert told["data"][0] == "redistributed" and "the global batch was 64 and is 32" in told["data"][1]
    with np.load(dump) as found:
        assert len(found) > 10
        for name in found:
            parts = [saved[f"rank/{rank}/{name}"] for rank in range(2)]
            assert not np.array_equal(*parts), name
            mean = ((parts[0].astype(np.float64) + parts[1]) / 2).astype(np.float32)
            assert np.array_equal(found[name], mean), name
    assert CheckpointReader(alone.newest()).manifest.replicas == "equal"
