"""What the event of a resume says of it."""

from __future__ import annotations

import pytest

from ratchet_contract.checkpoint.resume_report import (
    Base,
    ComponentReport,
    EnvironmentDifference,
    Redone,
    ResumeReport,
    StepDifference,
    Verdict,
    is_proved,
    proof_text,
)

BASE = Base(step=15, attempt=2)
EXACT = ComponentReport(component="rng", rank=0, status="exact", reason=None)
LOST = ComponentReport(component="attributes", rank=1, status="not-exact", reason="__main__:best changed in training")


def test_resume_sentence_names_inexact_components_and_differences() -> None:
    def said(**report: object) -> str:
        return ResumeReport.model_validate({"base": BASE, "world_size": 2, **report}).sentence()

    assert said(verdict="exact", components=[EXACT]) == "exact"
    named = "not-exact: attributes of rank 1: __main__:best changed in training"
    assert said(verdict="not-exact", components=[EXACT, LOST]) == named
    torch = EnvironmentDifference(key="torch", recorded="2.12.0", current="2.13.0")
    assert said(verdict="not-exact", differences=[torch]) == "not-exact: torch (2.12.0 -> 2.13.0)"
    assert said(verdict="not-exact", differences=[torch, torch]).endswith("2.13.0) and 1 more")
    code = EnvironmentDifference(key="code_digest", recorded="a", current="b")
    assert said(verdict="not-exact", components=[LOST], differences=[code]) == "not-exact: code changed (a -> b)"


def test_resume_sentence_mentions_earlier_inexact_resume_of_base() -> None:
    note = "not exact since the resume from step 90, attempt 1: the checkpoint itself has other bits"
    report = ResumeReport(verdict="exact", base=BASE, world_size=2, components=[EXACT], notes=["of the data", note])
    assert report.sentence() == "exact; not exact since the resume from step 90, attempt 1"
    proved = proof_text(report, Redone(steps=9, compared=9, equal=9))
    assert proved == "exact, proved (9 of 9 redone steps); not exact since the resume from step 90, attempt 1"


@pytest.mark.parametrize(
    ("verdict", "compared", "differs", "proved"),
    [
        ("exact", 9, False, True),
        ("fresh", 1, False, True),
        ("exact", 0, False, False),
        ("exact", 9, True, False),
        ("not-exact", 9, False, False),
        ("unmanaged", 9, False, False),
    ],
)
def test_redone_steps_prove_a_verdict_only_if_some_were_compared_and_none_differs(
    verdict: Verdict, compared: int, differs: bool, proved: bool
) -> None:
    first = StepDifference(step=3, rank=1, part="parameters") if differs else None
    redone = Redone(steps=9, compared=compared, equal=2 if differs else compared, first_difference=first)
    assert is_proved(verdict, redone) is proved
    assert (", proved (" in proof_text(ResumeReport(verdict=verdict, base=BASE, world_size=2), redone)) is proved


def test_base_with_legacy_epoch_key_reads_attempt() -> None:
    assert Base.model_validate({"step": 100, "epoch": 3, "digest": "d"}).attempt == 3
    assert Base.model_validate({"step": 100, "attempt": 3, "epoch": 9}).attempt == 3
