"""Retention over a whole job by what the database knows, branches left behind, and what was found damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Base
from ratchet_contract.paths import MANIFEST_NAME, PINNED_NAME, VERIFIED_NAME, JobPaths, checkpoint_dir_name
from ratchet_contract.phases import JobPhase
from ratchet_service.checkpoints.lineage import lineage_of
from ratchet_service.db.models import Job
from tests.support.api import Api, checkpoint_message, message, training_message
from tests.support.checkpoints import list_names, make_checkpoint, write_ranks
from tests.support.retention import run_retention_for_attempt

pytestmark = pytest.mark.takes_turns


class Told:
    """One job of which attempts tell; sequence numbers are counted here."""

    def __init__(self, api: Api, **checkpoint: Any) -> None:
        self.api, self.id = api, api.submit(checkpoint=checkpoint)
        self.paths: JobPaths = api.settings.paths.job(self.id)
        self._seq: dict[int, int] = {}
        self._attempt = 0
        self._parent = Base()

    def attempt(self, base: Manifest | None = None) -> int:
        self._attempt += 1
        self._parent = Base() if base is None else base.base
        self.api.attempt(self.id, number=self._attempt)
        start = training_message() | {"base": self._parent.model_dump()}
        self.say(start)
        return self._attempt

    def say(self, *messages: dict[str, Any]) -> None:
        first = self._seq.get(self._attempt, 0) + 1
        self._seq[self._attempt] = first + len(messages) - 1
        answer = self.api.report(self.id, (0, first, list(messages)), number=self._attempt)
        assert answer.json()["acked"]["0"] == self._seq[self._attempt], answer.text

    def save(self, *steps: int, reason: str = "schedule", **values: float | str) -> list[Manifest]:
        """Checkpoints, each with the same values of metrics at its step."""
        made = []
        for step in steps:
            manifest = make_checkpoint(
                self.paths.checkpoints,
                step,
                self._attempt,
                parent=self._parent,
                job_id=self.id,
                seed=step,
                reason=reason,
            )
            self._parent = manifest.base
            facts = {
                "digest": manifest.digest,
                "reason": reason,
                "stall": step / 1000,
                "size": manifest.size,
                "parent": manifest.parent.model_dump(),
            }
            self.say(checkpoint_message(step, self._attempt) | facts)
            if values:
                self.say(message("metrics", step=step, values=values))
            made.append(manifest)
        return made

    def end(self, phase: JobPhase = JobPhase.SUSPENDED) -> None:
        """What the service does with the files when an attempt is over."""
        with self.api.database.read() as session:
            segments = lineage_of(session, session.get_one(Job, self.id))
        run_retention_for_attempt(self.api.database, self.id, self.paths, segments, self._attempt)
        self.api.set_phase(self.id, phase)

    def there(self) -> list[str]:
        return [short(name) for name in list_names(self.paths.checkpoints)]

    def views(self, **query: Any) -> dict[str, Any]:
        found = self.api.client.get(f"/v1/jobs/{self.id}/checkpoints", params=query).json()["items"]
        return {short(view["id"]): view for view in found}

    def events(self) -> list[str]:
        return [e["type"] for e in self.api.client.get(f"/v1/jobs/{self.id}/events").json()["items"]]

    def post(self, action: str, **body: Any) -> Any:
        return self.api.client.post(f"/v1/jobs/{self.id}/checkpoints/{action}", json=body)

    def directory(self, step: int, attempt: int = 1) -> Path:
        return self.paths.checkpoint(step, attempt)


def short(name: str) -> str:
    """``50.1`` for step 50 of attempt 1."""
    step, _, attempt = name.removeprefix("step-").partition(".a")
    return f"{int(step)}.{int(attempt)}"


def damage(directory: Path) -> None:
    path = next(directory.glob("rank-00001*"))
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


def test_retention_deletes_the_first_save_once_two_newer_ones_exist(api: Api) -> None:
    told = Told(api, keep_last=5, keep_best={"metric": "m", "mode": "max"})
    told.attempt()
    (first,) = told.save(1, reason="first", m=9.0)
    told.end()
    told.attempt(first)
    told.save(10, m=1.0)
    told.end()
    assert told.there() == ["1.1", "10.2"] and told.views()["1.1"]["reason"] == "first"
    told.attempt(first)
    told.save(12, m=1.0)
    told.end()
    assert told.there() == ["1.1", "10.2", "12.3"]  # one of these is on another branch
    told.save(20, m=1.0)
    told.end()
    assert told.there() == ["10.2", "12.3", "20.3"] and "1.1" not in told.views(state="committed")


def test_retention_rules_apply_across_attempts(api: Api) -> None:
    job = Told(api, keep_last=2, keep_every=50, keep_best={"metric": "acc", "mode": "max"})
    job.attempt()
    job.save(10, acc=0.1)
    (best,) = job.save(20, acc=0.9)
    job.save(30, acc="NaN")
    job.save(40)
    (base,) = job.save(50, acc=0.2)
    job.end()
    assert job.there() == ["20.1", "40.1", "50.1"]
    job.attempt(base)
    job.save(60, 70, 80, acc=0.9)  # of equals the newer is better
    job.end()
    assert job.there() == ["50.1", "70.2", "80.2"]
    assert {name: view["metric"] for name, view in job.views().items()} == {"50.1": 0.2, "70.2": 0.9, "80.2": 0.9}
    assert job.views()["80.2"]["stall"] == 0.08
    assert best.id in {view["id"] for view in job.views(state="deleted").values()}


def test_keep_best_uses_metric_values_of_the_checkpoints_own_branch(api: Api) -> None:
    """Steps that another branch did again have its values; an evaluation after the resume speaks of the base itself."""
    job = Told(api, keep_last=2, keep_best={"metric": "loss"})
    job.attempt()
    first, second, third = job.save(10, 20, 30, loss=0.5)
    job.attempt(first)
    job.say(message("metrics", step=10, values={"loss": 0.4}), message("metrics", step=20, values={"loss": 0.0}))
    assert {name: view["metric"] for name, view in job.views().items()} == {"10.1": 0.4, "20.1": None, "30.1": 0.5}
    assert [job.views()[name]["lineage"] for name in ("10.1", "20.1", "30.1")] == ["current", "abandoned", "abandoned"]
    job.save(40, 50, loss=0.6)
    job.end()
    assert job.there() == ["10.1", "20.1", "30.1", "40.2", "50.2"]
    assert (second.step, third.step) == (20, 30)


def test_prune_removes_abandoned_branches_and_uncommitted_checkpoints(api: Api) -> None:
    job = Told(api, keep_last=2)
    job.attempt()
    first, second, third = job.save(10, 20, 30)
    job.attempt(first)
    job.save(25, 35)
    make_checkpoint(job.paths.checkpoints, 99, 1, job_id=job.id)  # a zombie's: no row knows it
    write_ranks(job.directory(40, 1))  # never committed
    write_ranks(job.directory(45, 2))  # being written now
    assert job.post(f"{second.id}/pin").json()["pinned"] is True
    wanted = [checkpoint_dir_name(step, 1) for step in (30, 40, 99)]
    dry = job.post("prune", dry_run=True).json()
    assert (dry["dry_run"], dry["checkpoints"], dry["quarantined"]) == (True, wanted, [])
    assert dry["size"] > third.size * 2 and "30.1" in job.there()
    done = job.post("prune").json()
    assert done == dry | {"dry_run": False}
    assert job.there() == ["10.1", "20.1", "25.2", "35.2", "45.2"]
    assert set(job.views()) == {"10.1", "20.1", "25.2", "35.2"}
    assert job.events()[-1] == "checkpoints-pruned"
    assert job.post("prune").json()["checkpoints"] == []
    assert job.events().count("checkpoints-pruned") == 1
    job.api.set_phase(job.id, JobPhase.SUSPENDED)
    assert job.post("prune").json()["checkpoints"] == [checkpoint_dir_name(45, 2)]
    assert job.api.client.post(f"/v1/jobs/{job.id}/resume", json={"from_step": 10}).status_code == 200
    assert (
        job.post("prune").json()["checkpoints"] == []
    )  # what the resume leaves behind is not left before it has begun


def test_verify_quarantines_a_damaged_checkpoint_of_a_suspended_job(api: Api) -> None:
    job = Told(api, keep_last=2)
    job.attempt()
    first, second = job.save(10, 20)
    damage(job.directory(20))
    job.api.set_phase(job.id, JobPhase.SUSPENDED)
    assert api.job(job.id)["last_checkpoint"] == second.id
    assert job.post(f"{second.id}/pin").json()["pinned"] is True
    result = job.post(f"{second.id}/verify").json()
    assert (result["verification"], result["state"]) == ("damaged", "quarantined")
    assert list_names(job.paths.quarantine) == [second.id] and job.there() == ["10.1"]
    assert job.views()["20.1"]["state"] == "quarantined"
    assert job.events()[-2:] == ["verified", "checkpoint-quarantined"]
    assert api.job(job.id)["last_checkpoint"] == first.id
    damage(job.directory(10))
    job.post(f"{first.id}/verify")
    assert api.job(job.id)["last_checkpoint"] is None
    again = job.post(f"{first.id}/verify")
    assert (again.status_code, again.json()["code"]) == (409, "checkpoint-gone")
    gone = job.post("prune", quarantined=True).json()
    assert gone["quarantined"] == [first.id, second.id] and list_names(job.paths.quarantine) == []
    assert job.views() == {}


def test_damaged_checkpoint_is_quarantined_only_after_the_attempt_ends(api: Api) -> None:
    job = Told(api, keep_last=2)
    job.attempt()
    _, bad, *_ = job.save(10, 20, 30)
    damage(job.directory(20))
    result = job.post(f"{bad.id}/verify").json()
    assert (result["verification"], result["state"]) == ("damaged", "committed")
    assert "20.1" in job.there()
    job.end()
    assert job.there() == ["10.1", "30.1"], "what is damaged does not count as kept"
    assert job.events().count("checkpoint-quarantined") == 1 and list_names(job.paths.quarantine) == [bad.id]


def test_damaged_checkpoint_that_cannot_be_moved_is_reported_and_moved_at_a_later_end(api: Api) -> None:
    job = Told(api, keep_last=2)
    job.attempt()
    good, bad = job.save(10, 20)
    damage(job.directory(20))
    job.api.set_phase(job.id, JobPhase.SUSPENDED)
    job.paths.quarantine.touch()  # no checkpoint can be moved into a file
    assert job.post(f"{bad.id}/verify").json()["state"] == "committed"
    query = {"type": "checkpoint-not-quarantined"}
    (event,) = api.client.get(f"/v1/jobs/{job.id}/events", params=query).json()["items"]
    assert str(job.directory(20)) in event["message"] and str(job.paths.quarantine) in event["message"]
    job.paths.quarantine.unlink()
    job.attempt(good)
    job.end()
    assert job.there() == ["10.1"] and list_names(job.paths.quarantine) == [bad.id]


def test_damaged_checkpoint_that_a_fork_needs_is_not_quarantined(api: Api) -> None:
    job = Told(api)
    job.attempt()
    (source,) = job.save(10)
    assert api.client.post(f"/v1/jobs/{job.id}/fork", json={}).status_code == 201
    job.api.set_phase(job.id, JobPhase.SUSPENDED)
    damage(job.directory(10))
    assert job.post(f"{source.id}/verify").json()["state"] == "committed"
    assert job.there() == ["10.1"]


def test_checkpoint_deleted_during_verify_is_not_reported_as_damaged(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    from ratchet_service.usecases import checkpoints
    from ratchet_store.retention.delete import delete

    job = Told(api)
    job.attempt()
    (manifest,) = job.save(10)
    real = checkpoints.verify

    def slow(directory: Path) -> Any:
        next(directory.glob("rank-00001*")).unlink()
        found = real(directory)
        delete(directory)
        return found

    monkeypatch.setattr(checkpoints, "verify", slow)
    answer = job.post(f"{manifest.id}/verify")
    assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint-gone")
    assert job.views()["10.1"]["verification"] is None


def test_verified_mark_is_removed_on_damage_and_pin_mark_is_kept(api: Api) -> None:
    job = Told(api)
    job.attempt()
    (manifest,) = job.save(10)
    job.post(f"{manifest.id}/verify")
    assert (job.directory(10) / VERIFIED_NAME).exists()
    damage(job.directory(10))
    job.post(f"{manifest.id}/verify")
    assert not (job.directory(10) / VERIFIED_NAME).exists()
    job.post(f"{manifest.id}/pin")
    (job.directory(10) / MANIFEST_NAME).unlink()
    fork = api.client.post(f"/v1/jobs/{job.id}/fork", json={"checkpoint_id": manifest.id})
    assert fork.status_code == 409, "its source is gone"
    assert (job.directory(10) / PINNED_NAME).exists(), "a later pin that fails takes no earlier one's mark away"
