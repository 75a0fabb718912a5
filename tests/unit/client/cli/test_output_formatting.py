"""How the command line puts figures into words, and lays them out on terminals of any width."""

from __future__ import annotations

import io
import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console

from ratchet_client.cli.commands import submit, wait
from ratchet_client.cli.commands.compare import difference_lines
from ratchet_client.cli.commands.config import mask_token
from ratchet_client.cli.commands.live_view import JobLines
from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.job_figures import (
    Snapshot,
    eta_text,
    snapshot_fields,
    sparkline,
    speed_text,
    waiting_text,
)
from ratchet_client.cli.shared.options import parse_time, step_text, steps
from ratchet_contract.api.views import ComparisonView, HookView, JobView, PlanView
from tests.support.scripted_server import JOB

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
HOOK = HookView.model_validate(
    {"job_id": "j", "name": "powerSGD", "wrapper": None, "parameters": {}, "stateful": True, "phase": "compressing",
     "iteration": 120, "compression_rate": 7.314}
)  # fmt: skip


def snapshot(losses: tuple[float, ...] = (2.0, 1.0, 0.5), **changes: Any) -> Snapshot:
    progress = {"step": 1200, "total_steps": 6000, "steps_per_second": 40.0, "steps_at_risk": 37}
    job = JobView.model_validate(JOB | {"progress": progress, "last_checkpoint": "step-000000001163.a0001"} | changes)
    return Snapshot(job, HOOK, losses, datetime.now(UTC) - timedelta(seconds=12))


def drawn(now: Snapshot, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(JobLines(now))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_job_panel_fits_any_terminal_width_without_losing_values() -> None:
    for width in (30, 40, 80, 200):
        text = drawn(snapshot(), width)
        assert max(len(line) for line in text.splitlines()) <= width
        words = " ".join(text.split())
        for part in (
            "RUNNING",
            "1200/6000",
            "loss 0.5000",
            "40 steps/s",
            "2m 00s left",
            "iteration 120",
            "37 steps at risk",
        ):
            assert part in words, (width, part, text)


def test_job_panel_without_steps_shows_elapsed_time() -> None:
    started = (datetime.now(UTC) - timedelta(seconds=83)).isoformat()
    text = drawn(snapshot((), progress={}, started_at=started, last_checkpoint=None), 60)
    assert "1m 2" in text and "no steps reported" in text and "left" not in text


def test_queued_job_shows_reason_and_next_try() -> None:
    later = (datetime.now(UTC) + timedelta(seconds=90)).isoformat()
    now = snapshot(phase="QUEUED", message="waits for a free GPU", not_before=later)
    assert waiting_text(now.job).startswith("waits for a free GPU (next try in 1m 2")
    assert waiting_text(snapshot(message="old news").job) == ""


def test_queued_job_shows_queue_position() -> None:
    waits = {"phase": "QUEUED", "message": "waits for 1 of 4 CPU slots"}
    assert waiting_text(snapshot(**waits, position=12).job) == "waits for 1 of 4 CPU slots (position 12 in the queue)"
    assert waiting_text(snapshot(**waits, ahead_at_least=1000).job).endswith(
        "(1000 jobs or more ahead of it in the queue)"
    )
    assert waiting_text(snapshot(**waits).job) == "waits for 1 of 4 CPU slots", "a service that does not tell"


@pytest.mark.parametrize(
    ("values", "drawing"),
    [((), ""), ((1.0,), ""), ((1.0, 1.0), "▁▁"), ((3.0, 2.0, 1.0), "█▄▁"), ((1.0, math.nan, 2.0), "▁ █"),
     ((math.inf, 1.0, 2.0), " ▁█")],
)  # fmt: skip
def test_a_sparkline_runs_from_the_smallest_to_the_largest_value(values: tuple[float, ...], drawing: str) -> None:
    assert sparkline(values).replace("▅", "▄") == drawing


def test_speed_and_eta_are_formatted_with_units() -> None:
    assert (speed_text(42.123), speed_text(0.08), speed_text(None)) == ("42.1 steps/s", "12.5 s/step", "")
    slow = snapshot(progress={"step": 0, "total_steps": 100, "steps_per_second": 0.001})
    assert eta_text(slow) == "1d 03h"
    assert eta_text(snapshot(progress={"step": 5, "steps_per_second": 1.0})) == ""


def test_non_finite_numbers_are_strings_in_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_line(snapshot_fields(snapshot((1.0, math.nan))))
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["loss"] == "NaN"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("10m", NOW - timedelta(minutes=10)),
        ("1.5h", NOW - timedelta(minutes=90)),
        ("1d", NOW - timedelta(days=1)),
        ("2026-01-31T12:00:00Z", NOW),
        ("2026-01-31T13:00:00+01:00", NOW),
    ],
)
def test_since_takes_an_age_or_a_time(text: str, moment: datetime) -> None:
    assert datetime.fromisoformat(parse_time(text, "--since", NOW)) == moment


@pytest.mark.parametrize(
    "text", ["", "m", "10", "10w", "-5m", "yesterday", "2026-01-31T12:00:00", "²m", "9999999999999d"]
)
def test_since_refuses_invalid_time_with_example(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="10m"):
        parse_time(text, "--since", NOW)


def test_a_short_token_is_masked_whole() -> None:
    assert mask_token("short") == "********" and mask_token("a-long-enough-token") == "********oken"


def test_job_without_reported_steps_is_not_shown_at_step_0() -> None:
    plain = JOB | {"warnings": [{"pointer": "/script", "code": "unmanaged-script", "detail": "no Session"}]}
    for job, column, words in (
        (plain, "-", "steps not reported"),
        (JOB, "0", "step 0"),
        (plain | {"progress": {"step": 7, "total_steps": 9}}, "7/9", "step 7/9"),  # a module of it made a Session
    ):
        view = JobView.model_validate(job)
        assert (steps(view), step_text(view)) == (column, words)


def test_dry_run_prints_batch_script_as_text_and_manifests_as_yaml(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=2\nsrun --kill-on-bad-exit=0 python -P -m ratchet_worker.agent launch.json\n"
    manifests = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "job-a0001"}, "spec": {"clusterIP": "None"}},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job-a0001"}, "spec": {"completions": 2}},
    ]
    request = {"script": script, "manifests": manifests, "queue": "short"}
    resolved = {"device": "cpu", "backend": "gloo", "threads_per_rank": 1, "python": "python"}
    launch = {"name": "job-a0001", "agent": {"command": ["python"]}, "request": request}
    spec = {"environment": {"requirements": ["timm==1.0", "einops"]}}
    plan = PlanView.model_validate({"spec": spec, "resolved": resolved, "warnings": [], "launch": launch})
    submit._show_plan(plan, as_json=False)
    shown = capsys.readouterr().out
    assert script in shown and "\n# what the engine is asked for: queue\nshort\n" in shown
    assert "timm==1.0, einops" in shown
    yaml_text = shown.partition("asked for: manifests\n")[2].partition("\n# what")[0]
    assert list(yaml.safe_load_all(yaml_text)) == manifests and yaml_text.startswith("apiVersion: v1\nkind: Service\n")
    assert "{" not in shown, "for people: nothing internal, no JSON"
    submit._show_plan(plan, as_json=True)
    assert json.loads(capsys.readouterr().out)["launch"]["request"] == request


def test_strict_job_with_checkpoint_is_advised_to_fork_for_new_code() -> None:
    """A resume with other code would be refused at once."""
    spec = {"code": {"path": "/my code"}, "determinism": "strict"}
    strict = JobView.model_validate(JOB | {"phase": "FAILED", "spec": spec})
    assert "with changed code: ratchet resume job-000000000001 --code '/my code'" in wait._resume_hint(strict)
    told = wait._resume_hint(strict.model_copy(update={"last_checkpoint": "step-000000000020.a0001"}))
    fork = "ratchet fork job-000000000001 --set determinism=warn --set code.path='/my code'"
    assert told.endswith(f"as a new job: {fork}") and "--code" not in told


@pytest.mark.parametrize(("different", "told"), [(1, None), (28, "all"), (90, "the first 50")])
def test_comparison_with_many_differences_hints_at_json_option(different: int, told: str | None) -> None:
    one = {
        "component": "user:lightning",
        "name": "n",
        "rank": 0,
        "place": "lightning, score (rank 0)",
        "detail": "1 against 2",
    }
    found = ComparisonView.model_validate(
        {"job_id": "j", "checkpoint_id": "c", "with_job_id": "k", "with_checkpoint_id": "d", "identical": False, "step": 30,
         "tensors": 4, "different": different, "differences": [one] * min(different, 50)}
    )  # fmt: skip
    hints = [line.strip() for line in difference_lines(found) if "--json" in line]
    assert hints == ([] if told is None else [f"with --json: {told} of them"])
