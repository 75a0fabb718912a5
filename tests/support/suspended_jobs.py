"""Jobs that are suspended behind real checkpoints, and resumed over HTTP with another number of ranks or another hook."""

from __future__ import annotations

from typing import Any

from ratchet_contract.phases import JobPhase
from tests.support.api import Api, checkpoint_message, training_message
from tests.support.checkpoints import make_checkpoint

SUMMARY: dict[str, Any] = {
    "name": "powerSGD", "phase": "compressing", "iteration": 10, "compression_rate": 8.0, "elements_before": 800,
    "elements_after": 100, "bytes_before": 3200, "bytes_after": 400,
}  # fmt: skip
REDISTRIBUTE = {"on_hook_mismatch": "redistribute"}


def world_spec(ranks: int, **more: Any) -> dict[str, Any]:
    return {"world": {"ranks_per_node": ranks}, **more}


def resume(api: Api, job_id: str, body: dict[str, Any], expect: int = 200) -> dict[str, Any]:
    answer = api.client.post(f"/v1/jobs/{job_id}/resume", json=body)
    assert answer.status_code == expect, answer.text
    return dict(answer.json())


def suspend_after_checkpoint(
    api: Api, job_id: str, step: int, epoch: int = 1, ranks: int = 2, code_digest: str | None = None
) -> None:
    """An attempt that ended after a checkpoint of ``ranks`` ranks; the job is suspended."""
    api.attempt(job_id, epoch)
    root = api.settings.paths.job(job_id).checkpoints
    hook = api.job(job_id)["spec"]["hook"]
    made = make_checkpoint(root, step, epoch, job_id=job_id, world_size=ranks, hook=hook, code_digest=code_digest)
    told = checkpoint_message(step, epoch, digest=made.digest)
    assert api.report(job_id, (0, 1, [training_message(), told]), number=epoch).status_code == 200
    api.set_phase(job_id, JobPhase.SUSPENDED)


def events(api: Api, job_id: str) -> list[dict[str, Any]]:
    return list(api.client.get(f"/v1/jobs/{job_id}/events?limit=100").json()["items"])
