"""Offline runs of W&B: one directory for each run, each step once, read from W&B's own file."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ratchet_service.trackers import wandb as wandb_module
from ratchet_service.trackers.sink import Batch, End, Note, Point, Run, TrackerError
from ratchet_service.trackers.wandb import WandbSink
from tests.support.server import processes_below, wait_for
from tests.support.wandb_files import read

pytestmark = pytest.mark.processes
BEGIN = datetime(2030, 1, 1, 12, tzinfo=UTC)
RUN = Run("job-abcdefghijkl", 1, "my digits", "ann", "team/digits", {"team": "vision"}, {"lr": "0.1"}, BEGIN)
END = End("SUCCEEDED", BEGIN + timedelta(hours=1), {"goodput": 0.97}, "/jobs/x/step-90")


def points(steps: range, name: str = "loss") -> list[Point]:
    return [Point(name, step, 1 / (step + 1), BEGIN + timedelta(seconds=step)) for step in steps]


def offline_runs(directory: Path) -> list[Path]:
    return sorted(directory.glob("**/*offline-run-*"))


def test_a_run_over_many_batches_and_services_is_one_directory_with_each_step_once(tmp_path: Path) -> None:
    state = WandbSink(tmp_path).export(RUN, {}, Batch(points(range(1000)), [], None))
    assert WandbSink(tmp_path).export(RUN, {}, Batch(points(range(1000)), [], None)) == state  # the state was lost
    later = Batch(points(range(1000, 2500)), [Note(1, 1400, BEGIN, "attempt 1 ended: oom")], None)
    WandbSink(tmp_path).export(RUN, state, later)
    state = WandbSink(tmp_path).export(RUN, state, later)
    with (tmp_path / RUN.name / "points.jsonl").open("ab") as file:
        file.write(b'{"step": 2500, "val')  # of a service that was killed while it wrote
    assert offline_runs(tmp_path) == []
    assert state["path"] == str(tmp_path / RUN.name)
    state = WandbSink(tmp_path).export(RUN, state, Batch([], [], END))
    lines = [json.loads(line) for line in (tmp_path / RUN.name / "points.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == list(range(2500))
    (made,) = offline_runs(tmp_path)
    assert made == tmp_path / RUN.name / "offline-run-20300101_120000-job-abcdefghijkl"
    assert state["path"] == str(made), "`ratchet trackers` shows what to give to wandb sync"
    assert not any(path.is_symlink() for path in made.rglob("*"))  # it can be copied
    found = read(made)
    assert [(step, row["loss"]) for step, row in found.rows] == [(one.step, one.value) for one in points(range(2500))]
    assert [row["_timestamp"] for _, row in found.rows] == [BEGIN.timestamp() + step for step in range(2500)]
    assert (found.run.run_id, found.run.display_name, found.run.run_group) == (RUN.name, "my digits", RUN.job_id)
    assert (found.run.project, list(found.run.tags)) == ("team-digits", ["team=vision"])
    assert found.config["lr"] == "0.1"
    assert found.config["ratchet"]["labels"] == {"team": "vision"}
    assert found.run.notes == "- step 1400, 2030-01-01 12:00:00 UTC: attempt 1 ended: oom"
    assert (found.summary["ratchet/goodput"], found.summary["ratchet/status"]) == (0.97, "SUCCEEDED")
    assert found.summary["ratchet/checkpoint"] == "/jobs/x/step-90"
    assert found.summary["loss"] == 1 / 2500
    assert found.exit_code == 0


def test_the_directory_is_one_that_wandb_sync_takes(tmp_path: Path) -> None:
    WandbSink(tmp_path).export(RUN, {}, Batch(points(range(3)), [], END))
    (made,) = offline_runs(tmp_path)
    command = [sys.executable, "-m", "wandb", "sync", "--dry-run", str(made)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert made.name in done.stdout + done.stderr


def test_series_that_come_late_are_in_the_rows_of_their_steps(tmp_path: Path) -> None:
    sink = WandbSink(tmp_path)
    first = [*points(range(0, 10, 2)), Point("lr", 8, 0.1, BEGIN + timedelta(hours=1))]
    state = sink.export(RUN, {}, Batch(first, [], None))
    sink.export(RUN, state, Batch(points(range(10), "norm"), [], END))
    found = read(offline_runs(tmp_path)[0])
    assert [step for step, _ in found.rows] == list(range(10))
    assert [set(row) & {"loss", "norm", "lr"} for _, row in found.rows] == [
        {"norm"} | ({"loss"} if step % 2 == 0 else set()) | ({"lr"} if step == 8 else set()) for step in range(10)
    ]
    assert found.rows[8][1]["_timestamp"] == BEGIN.timestamp() + 3600


def test_values_that_are_no_numbers_and_names_of_wandb_itself_survive(tmp_path: Path) -> None:
    names = ["loss", "", "_step", "_timestamp", "_runtime", "_wandb", "a.b/c d", "größe"]
    made = [Point(name, 5, 0.25, BEGIN) for name in names]
    made += [Point("loss", step, value, BEGIN) for step, value in ((6, math.nan), (7, math.inf), (8, -math.inf))]
    WandbSink(tmp_path).export(RUN, {}, Batch(made, [], END))
    rows = read(offline_runs(tmp_path)[0]).rows
    assert [step for step, _ in rows] == [5, 6, 7, 8]
    assert sorted(name for name, value in rows[0][1].items() if value == 0.25) == sorted(
        ["loss", "metric ", "metric _step", "metric _timestamp", "metric _runtime", "metric _wandb", "a.b/c d", "größe"]
    )
    assert math.isnan(rows[1][1]["loss"])
    assert [row["loss"] for _, row in rows[2:]] == [math.inf, -math.inf]


def test_a_directory_can_be_written_before_the_end_and_is_replaced(tmp_path: Path) -> None:
    sink = WandbSink(tmp_path)
    state = sink.export(RUN, {}, Batch(points(range(10)), [], None))
    made = sink.write_offline_run(RUN, state)
    assert len(read(made).rows) == 10
    (made / "mark").touch()
    left = tmp_path / RUN.name / ".tmp-of-a-killed-service"
    left.mkdir()
    last = Batch(points(range(10, 12)), [], replace(END, status="FAILED", checkpoint=None))
    for _ in range(2):  # the second time as after a crash
        sink.export(RUN, state, last)
    assert offline_runs(tmp_path) == [made]
    assert sorted(path.name for path in made.parent.iterdir()) == [made.name, "points.jsonl"]
    assert not (made / "mark").exists()
    found = read(made)
    assert [step for step, _ in found.rows] == list(range(12))
    assert (found.exit_code, found.summary["ratchet/status"]) == (1, "FAILED")


def test_labels_and_projects_that_wandb_refuses_are_changed_visibly(tmp_path: Path) -> None:
    labels = {"note": "x" * 255, "team": "vision"}
    odd = replace(RUN, labels=labels, experiment="a/b?" + "c" * 200, number=2, parent=RUN.name)
    WandbSink(tmp_path).export(odd, {}, Batch([], [Note(1, 0, BEGIN, "y" * 900)] * 20, END))
    found = read(offline_runs(tmp_path)[0])
    assert found.run.run_id == "job-abcdefghijkl-2"
    assert list(found.run.tags) == ["note=" + "x" * 50 + "... (cut)", "team=vision"]
    assert found.config["ratchet"]["labels"] == labels
    assert found.config["ratchet"]["parent"] == RUN.name
    assert found.run.project == "a-b-" + "c" * 124
    assert found.run.notes.startswith("(12 earlier notes left out)")


def test_a_file_that_has_lost_bytes_is_refused_and_not_filled(tmp_path: Path) -> None:
    sink = WandbSink(tmp_path)
    state = sink.export(RUN, {}, Batch(points(range(10)), [], None))
    path = tmp_path / RUN.name / "points.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(TrackerError, match=r"points\.jsonl has .* restore it from a backup"):
        sink.export(RUN, state, Batch(points(range(10, 12)), [], None))


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrackerError, match=r"W&B: .*File exists.* check the space and the permissions"):
        WandbSink(tmp_path / "file").export(RUN, {}, Batch([], [], None))


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("raise ModuleNotFoundError(\"No module named 'wandb'\")", r"pip install 'ratchet-train\[wandb\]'"),
        ("import os; os.write(2, b'first\\nlast line\\n'); os._exit(3)", "exit code 3 .*: last line"),
        ("import time; time.sleep(600)", "not written within 1 s"),
        ("Settings = dict\ndef init(**_): raise RuntimeError('broken')", "RuntimeError: broken"),
    ],
)
def test_a_package_that_fails_is_an_error_and_the_repeat_writes_the_run(
    tmp_path: Path, package: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/wandb.py").write_text(package)
    sink, last = WandbSink(tmp_path / "runs"), Batch(points(range(3)), [], END)
    with monkeypatch.context() as patch, pytest.raises(TrackerError, match=said):
        patch.setenv("PYTHONPATH", str(tmp_path / "broken"))
        if "sleep" in package:
            patch.setattr(wandb_module, "_SECONDS", 1.0)
        sink.export(RUN, {}, last)
    assert offline_runs(tmp_path) == []
    assert processes_below(tmp_path / "runs") == []
    sink.export(RUN, {}, last)
    assert len(read(offline_runs(tmp_path)[0]).rows) == 3


def test_its_process_ends_with_a_killed_service(tmp_path: Path) -> None:
    """A process that exports stands for the service. It is killed in the middle of the directory."""
    sink = WandbSink(tmp_path)
    state = sink.export(RUN, {}, Batch(points(range(300_000)), [], None))
    program = (
        "from tests.integration.service.trackers.test_wandb import RUN\n"
        "from pathlib import Path; from ratchet_service.trackers.wandb import WandbSink\n"
        f"WandbSink(Path({str(tmp_path)!r})).write_offline_run(RUN, {state!r})\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[4]) as service:
        wait_for(
            lambda: any(one.stat().st_size > 10_000 for one in tmp_path.glob("**/.tmp-*/wandb/*/*.wandb")), "the file"
        )
        assert processes_below(tmp_path)
        service.send_signal(signal.SIGKILL)
    wait_for(lambda: not processes_below(tmp_path), "its processes to end", 60)
    assert not list((tmp_path / RUN.name).glob("offline-run-*"))


def test_a_service_imports_neither_wandb_nor_an_http_client_before_it_exports() -> None:
    program = (
        "import sys; import ratchet_service.trackers.wandb, ratchet_service.trackers.mlflow\n"
        "print(sorted({'wandb', 'mlflow', 'httpx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
