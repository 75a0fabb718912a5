"""What the event of a resume says of it."""

from __future__ import annotations

from ratchet_contract.resume import Base, ComponentReport, EnvironmentDifference, ResumeReport

BASE = Base(step=15, epoch=2)
EXACT = ComponentReport(component="rng", rank=0, status="exact", reason=None)
LOST = ComponentReport(component="attributes", rank=1, status="not-exact", reason="__main__:best changed in training")


def test_what_is_not_exact_is_named() -> None:
    def said(**report: object) -> str:
        return ResumeReport.model_validate({"base": BASE, "world_size": 2, **report}).sentence()

    assert said(verdict="exact", components=[EXACT]) == "exact"
    named = "not-exact: attributes of rank 1: __main__:best changed in training"
    assert said(verdict="not-exact", components=[EXACT, LOST]) == named
    code = EnvironmentDifference(key="code_digest", recorded="a", current="b")
    assert said(verdict="not-exact", components=[LOST], differences=[code]) == "not-exact: code changed (a -> b)"
