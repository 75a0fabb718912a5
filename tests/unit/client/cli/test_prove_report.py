"""What a proof says of a resume that was not exact."""

from __future__ import annotations

from pathlib import Path

from ratchet_client.cli.prove import _lines, _objects_without_session, proof
from ratchet_contract.api.views import ResumeReportView
from ratchet_contract.checkpoint.resume_report import EnvironmentDifference


def test_env_variables_set_by_proof_are_not_reported_as_lost() -> None:
    def lost(*keys: str) -> list[str]:
        differences = [EnvironmentDifference(key=key, recorded=None, current="another") for key in keys]
        report = {
            "verdict": "not-exact",
            "base": {"step": 5, "attempt": 1, "digest": None},
            "world_size": 1,
            "differences": differences,
        }
        return proof._lost_state(ResumeReportView.model_validate(report))

    assert lost("spec:env", "spec:env.WANDB_MODE") == [] and lost("spec_digest") == []
    assert lost("spec:env.SEED") == ["spec:env.SEED was None, and is another"]


def test_proof_advises_fixing_lost_state_first() -> None:
    lost = "unregistered is not-exact: LambdaLR: created by the script and not registered: pass it to session.prepare"
    ids = {"job_id": "job-a", "checkpoint_id": "a", "with_job_id": "job-b", "with_checkpoint_id": "b"}
    found = {
        "identical": False,
        "step": 9,
        "tensors": 4,
        "different": 0,
        "differences": [],
        "advice": "register the object",
    }
    seen = proof.Proof.model_validate(
        {"verdict": "differs", "what": "x", "steps": 9, "total": None, "comparison": ids | found}
    )
    assert _lines(seen)[-1] == "next: register the object"
    told = _lines(seen.model_copy(update={"reports": ["a note", lost], "lost": "unregistered"}))
    assert (
        told[-1] == "next: what the resume lost, listed above (unregistered); the other differences may result from it"
    )


def test_not_repeatable_proof_lists_unsaved_and_uncompared_state() -> None:
    ids = {"job_id": "job-a", "checkpoint_id": "a", "with_job_id": "job-b", "with_checkpoint_id": "b"}
    found = {"identical": False, "step": 9, "tensors": 4, "different": 0, "differences": [], "advice": "register it"}
    data = {"verdict": "not-repeatable", "what": "x", "steps": 9, "total": None}
    told = _lines(proof.Proof.model_validate({**data, "comparison": ids | found | {"unsaved": ["train:RNG"]}}))
    assert told[-1].startswith(
        "next: training has changed train:RNG: if one of them is a generator, give it a fixed seed"
    )
    assert not any("register it" in line for line in told)
    same = ids | found | {"identical": True, "advice": None}
    proved = {**data, "verdict": "proved", "comparison": same, "unseen": ["best (train.py, line 3)"]}
    line = "not compared: files that the script itself writes; best (train.py, line 3)"
    assert line in _lines(proof.Proof.model_validate(proved))
    differs = proof.Proof.model_validate({**proved, "verdict": "differs", "comparison": ids | found})
    assert "In no checkpoint, and perhaps the cause: best (train.py, line 3)" in _lines(differs)


def test_proof_names_objects_of_the_loop_that_the_session_does_not_have(tmp_path: Path) -> None:
    """An average in a class of the script's own is in no checkpoint, so the comparison cannot see that it starts again."""
    script = """
class Average:
    def __init__(self, model): self.values = [p.clone() for p in model.parameters()]
    def update(self, model): self.values = [0.9 * v + 0.1 * p for v, p in zip(self.values, model.parameters())]

session = Session()
model, optimizer, loader = session.prepare(model, optimizer, loader)
average = Average(model)
for epoch in session.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        average.update(model)
"""
    (tmp_path / "train.py").write_text("from ratchet import Session\n" + script)
    spec = {"code": {"path": str(tmp_path)}, "script": ["train.py", "--lr", "1"]}
    assert _objects_without_session(spec) == ["average (train.py, line 16)"]
    given = script.replace("average = Average(model)", "average = session.prepare(Average(model))")
    (tmp_path / "train.py").write_text("from ratchet import Session\n" + given)
    assert _objects_without_session(spec) == []
    assert _objects_without_session({"task": {"entrypoint": "a:B"}}) == []
    assert _objects_without_session({**spec, "script": ["nothing.py"]}) == []
