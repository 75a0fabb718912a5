"""Online runs of W&B: each row once, over kills, repeats and faults of the server. The package ``wandb`` is real, its server is
a fake."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ratchet_service.config.settings import Settings
from ratchet_service.errors import StartError
from ratchet_service.trackers import wandb as wandb_module
from ratchet_service.trackers.open import open_sinks
from ratchet_service.trackers.sink import Batch, Note, Point, TrackerError
from ratchet_service.trackers.wandb import WandbSink
from tests.integration.service.trackers.test_wandb import BEGIN, END, RUN, points
from tests.support.fake_wandb import KEY, FakeRun, FakeWandb, Refused, fake_wandb
from tests.support.server import processes_below, wait_for

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[4]
STEP = "trainer/global_step"
SEED = 7
KILLS = min(int(os.environ.get("RATCHET_TEST_TRACKER_KILLS", "3")), 30)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    monkeypatch.setattr(wandb_module, "_PAUSE", 0.0)
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with fake_wandb() as fake:
        monkeypatch.setenv("WANDB_BASE_URL", fake.url)
        yield fake


def online(directory: Path) -> WandbSink:
    return WandbSink(directory, "online")


def rows_of(run: FakeRun) -> list[tuple[int, dict[str, float]]]:
    """Training step and values of each row. W&B's own step is the number of the row."""
    assert [row["_step"] for row in run.rows] == list(range(len(run.rows)))
    return [
        (row[STEP], {name: value for name, value in row.items() if name != STEP and not name.startswith("_")})
        for row in run.rows
    ]


def rows_in(made: list[Point]) -> list[tuple[int, dict[str, float]]]:
    return [(point.step, {point.name: point.value}) for point in made]


def test_a_run_over_many_batches_is_one_run_whose_charts_use_the_training_step(tmp_path: Path, fake: FakeWandb) -> None:
    first = points(range(0, 100, 2))
    state = online(tmp_path).export(RUN, {}, Batch(first, [], None))
    assert online(tmp_path).export(RUN, {}, Batch(first, [], None)) == state  # the state was lost
    run = fake.run
    assert rows_of(run) == rows_in(first)
    assert [row["_timestamp"] for row in run.rows] == [point.at.timestamp() for point in first]
    assert (run.id, run.project, run.state) == (RUN.name, "team-digits", "running")
    assert (run.fields["displayName"], run.fields["groupName"], run.fields["tags"]) == (
        "my digits",
        RUN.job_id,
        ["team=vision"],
    )
    assert state["url"] == f"{fake.url}/team/team-digits/runs/{RUN.name}"
    run.fields |= {"displayName": "renamed by a user", "tags": ["team=vision", "of a user"]}
    late = points(range(50), "norm")  # a series that comes late at lower steps
    last = Batch(late, [Note(1, 40, BEGIN, "attempt 1 ended: oom")], None)
    online(tmp_path).export(RUN, state, last)
    state = online(tmp_path).export(RUN, state, last)
    online(tmp_path).export(RUN, state, Batch([], [], END))
    assert rows_of(run) == rows_in([*first, *late])
    assert (run.fields["displayName"], run.fields["tags"]) == ("renamed by a user", ["team=vision", "of a user"])
    assert run.fields["notes"] == "- step 40, 2030-01-01 12:00:00 UTC: attempt 1 ended: oom"
    assert (run.config["lr"], run.config["ratchet"]["owner"]) == ("0.1", "ann")
    metrics = run.config["_wandb"][
        "m"
    ]  # 1: name, 2: pattern, 5: number of the metric that is its step (wandb_internal.proto)
    assert [metrics[one["5"] - 1]["1"] for one in metrics if one.get("2") == "*"] == [STEP]
    summary = json.loads(run.summary)
    assert (summary["loss"], summary["norm"]) == (first[-1].value, late[-1].value)
    assert (summary["ratchet/goodput"], summary["ratchet/checkpoint"]) == (0.97, "/jobs/x/step-90")
    assert run.state == "finished"
    assert [path.name for path in (tmp_path / RUN.name).iterdir()] == ["points.jsonl"]
    assert fake.refused == []


SERVICE = """
import json, random, sys
from pathlib import Path
from ratchet_service.trackers import wandb
from ratchet_service.trackers.sink import TrackerError
from tests.integration.service.trackers.test_wandb import RUN
from tests.integration.service.trackers.test_wandb_online import SEED, drawn_batches

wandb._PAUSE = 0.0
home = Path(sys.argv[1])
batches = drawn_batches(random.Random(SEED))
sink, record = wandb.WandbSink(home / "runs", "online"), home / "record"
number, state = json.loads(record.read_text()) if record.exists() else (0, {})
while number < len(batches):
    try:
        state = sink.export(RUN, state, batches[number])
    except TrackerError as error:
        print(error, file=sys.stderr)
        continue
    number += 1
    (home / "new").write_text(json.dumps([number, state]))
    (home / "new").rename(record)
"""


def drawn_batches(draw: random.Random) -> list[Batch]:
    """Three series; each batch goes on with some of them, also at steps below those of the batch before."""
    newest = dict.fromkeys(("loss", "norm", "lr"), 0)
    out = []
    for _ in range(max(2, KILLS // 2)):
        made: list[Point] = []
        for name in draw.sample(sorted(newest), 2):
            count = draw.randrange(1, 400)
            made += points(range(newest[name], newest[name] + count), name)
            newest[name] += count
        out.append(Batch(sorted(made, key=lambda point: point.step), [], None))
    return [*out, Batch([], [], END)]


@pytest.mark.skipif("RATCHET_TEST_TRACKER_KILLS" not in os.environ, reason="make trackers runs it")
def test_each_row_is_once_over_drawn_kills_and_lost_answers(tmp_path: Path, fake: FakeWandb) -> None:
    """Kills of the service, of its child and of W&B's own process at random moments; errors and lost answers of the server."""
    draw = random.Random(SEED)
    batches = drawn_batches(draw)  # the service draws the same

    def before(_path: str) -> None:
        if draw.random() < 0.15:
            raise Refused(500, "broken")

    def after(_path: str) -> None:
        if draw.random() < 0.15:
            raise ConnectionError("the lines are stored, and the answer is lost")

    fake.before, fake.after = before, after
    command = [sys.executable, "-c", SERVICE, str(tmp_path)]
    kills, until = 0, time.monotonic() + 200 + 10 * KILLS
    while True:
        with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as service:
            try:
                service.wait(draw.uniform(2, 7) if kills < KILLS else max(1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                assert time.monotonic() < until
                kills += 1
                own = [pid for pid in processes_below(tmp_path) if pid != service.pid]
                if own and draw.random() < 0.5:
                    os.kill(draw.choice(own), signal.SIGKILL)
                    time.sleep(draw.uniform(0, 2))
                service.kill()
        if service.returncode == 0:
            break
    wait_for(lambda: not processes_below(tmp_path), "its processes to end", 60)
    made = [row for batch in batches for row in wandb_module._lines(batch)]
    assert rows_of(fake.run) == [(line["step"], line["values"]) for line in made]
    assert fake.run.state == "finished"
    assert fake.refused == []
    assert kills > 1


def test_an_upload_waits_for_the_end_of_a_burst_and_half_a_minute(
    tmp_path: Path, fake: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, made = online(tmp_path), points(range(40))
    state = sink.export(RUN, {}, Batch(made[:10], [], None, last=False))
    assert fake.runs == {}
    state = sink.export(RUN, state, Batch(made[10:20], [], None))
    assert len(fake.run.history) == 20
    monkeypatch.setattr(wandb_module, "_PAUSE", 3600.0)
    state = sink.export(RUN, state, Batch(made[20:30], [], None))
    assert len(fake.run.history) == 20
    sink.export(RUN, state, Batch(made[30:], [], replace(END, status="FAILED", checkpoint=None)))
    assert rows_of(fake.run) == rows_in(made)
    assert fake.run.state == "failed"
    assert fake.refused == []


def test_values_that_are_no_numbers_and_names_of_wandb_itself_survive(tmp_path: Path, fake: FakeWandb) -> None:
    names = ["loss", "", "_step", "_timestamp", "_runtime", "_wandb", STEP, "a.b/c d", "größe"]
    made = [Point(name, 5, 0.25, BEGIN) for name in names]
    made += [Point("loss", step, value, BEGIN) for step, value in ((6, math.nan), (7, math.inf), (8, -math.inf))]
    online(tmp_path).export(RUN, {}, Batch(made, [], END))
    rows = rows_of(fake.run)
    assert [step for step, _ in rows] == [5, 6, 7, 8]
    kept = ["metric ", "metric _step", "metric _timestamp", "metric _runtime", "metric _wandb", f"metric {STEP}"]
    assert rows[0][1] == dict.fromkeys([*kept, "loss", "a.b/c d", "größe"], 0.25)
    assert math.isnan(rows[1][1]["loss"])
    assert [row["loss"] for _, row in rows[2:]] == [math.inf, -math.inf]


def test_rows_that_wandb_refuses_are_an_error_and_the_repeat_sends_them(
    tmp_path: Path, fake: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package itself ends without an error here."""
    monkeypatch.setattr(wandb_module, "_COUNT_SECONDS", 3.0)

    def refuse(_path: str) -> None:
        raise Refused(403, "permission denied")

    fake.before = refuse
    batch = Batch(points(range(5)), [], None)
    with pytest.raises(TrackerError, match="W&B has 0 rows of it, and not 5"):
        online(tmp_path).export(RUN, {}, batch)
    fake.before = lambda _path: None
    monkeypatch.setattr(wandb_module, "_COUNT_SECONDS", 30.0)
    online(tmp_path).export(RUN, {}, batch)
    assert rows_of(fake.run) == rows_in(points(range(5)))


def test_a_server_that_hangs_ends_at_the_deadline_with_all_processes(
    tmp_path: Path, fake: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    fake.before = lambda _path: assert_set(ended)
    monkeypatch.setattr(wandb_module, "_UPLOAD_SECONDS", 15.0)
    try:
        with pytest.raises(TrackerError, match=r"not uploaded within 15 s: .*upload.*: check WANDB_API_KEY"):
            online(tmp_path).export(RUN, {}, Batch(points(range(5)), [], None))
    finally:
        ended.set()
    assert processes_below(tmp_path) == []
    assert [path.name for path in (tmp_path / RUN.name).iterdir()] == ["points.jsonl"]


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_wrong_key_is_named_without_its_text(
    tmp_path: Path, fake: FakeWandb, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = KEY[:-1] + "f"
    monkeypatch.setenv("WANDB_API_KEY", wrong)
    with pytest.raises(TrackerError, match=r"error 401: .*: check WANDB_API_KEY") as refused:
        online(tmp_path).export(RUN, {}, Batch(points(range(5)), [], None))
    assert wrong not in str(refused.value)
    monkeypatch.setenv("WANDB_API_KEY", "short_key")
    with pytest.raises(TrackerError, match="must have 40") as refused:
        online(tmp_path).export(RUN, {}, Batch(points(range(5)), [], None))
    assert "short_key" not in str(refused.value)
    assert wrong not in "".join(capfd.readouterr())
    assert not any(wrong in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("config", [{"lr": {"value": 0.1}}, {}])
def test_a_run_of_the_script_itself_is_not_touched(
    tmp_path: Path, fake: FakeWandb, config: dict[str, dict[str, float]]
) -> None:
    theirs = {**config, "_wandb": {"value": {"t": {}}}}
    run = FakeRun(RUN.name, "team-digits", {"config": json.dumps(theirs)}, history=['{"_step":0,"loss":1}'])
    fake.runs["team-digits", RUN.name] = run
    with pytest.raises(TrackerError, match=r"the script itself has created .*: set another tracking.experiment"):
        online(tmp_path).export(RUN, {}, Batch(points(range(5)), [], None))
    assert run.history == ['{"_step":0,"loss":1}']
    assert fake.refused == []


def test_rows_that_wandb_has_lost_are_sent_again_and_foreign_ones_are_an_error(tmp_path: Path, fake: FakeWandb) -> None:
    sink, made = online(tmp_path), points(range(30))
    state = sink.export(RUN, {}, Batch(made[:20], [], None))
    del fake.run.history[5:]
    fake.run.summary = '{"_step":4}'
    state = sink.export(RUN, state, Batch(made[20:], [], None))
    assert rows_of(fake.run) == rows_in(made)
    fake.run.history.append('{"_step":30,"loss":1}')
    with pytest.raises(TrackerError, match="W&B has 31 rows of it, "):
        sink.export(RUN, state, Batch([], [], END))


def test_a_server_whose_history_is_behind_its_summary_gets_nothing_yet(tmp_path: Path, fake: FakeWandb) -> None:
    """The package would append the rows after the summary's step, and leave out those before."""
    sink, made = online(tmp_path), points(range(30))
    state = sink.export(RUN, {}, Batch(made[:20], [], None))
    behind, fake.run.history = fake.run.history[15:], fake.run.history[:15]
    later = Batch(made[20:], [], END)
    with pytest.raises(
        TrackerError, match="W&B has 15 rows of it, but goes on at step 20: either W&B is still storing"
    ):
        sink.export(RUN, state, later)
    assert (len(fake.run.history), fake.run.state, fake.refused) == (15, "running", [])
    fake.run.history += behind
    sink.export(RUN, state, later)
    assert rows_of(fake.run) == rows_in(made)


def test_a_run_that_began_offline_is_uploaded_whole(tmp_path: Path, fake: FakeWandb) -> None:
    made = points(range(30))
    state = WandbSink(tmp_path).export(RUN, {}, Batch(made[:20], [Note(1, 4, BEGIN, "oom")], None))
    online(tmp_path).export(RUN, state, Batch(made[20:], [], END))
    assert rows_of(fake.run) == rows_in(made)
    assert fake.run.fields["notes"] == "- step 4, 2030-01-01 12:00:00 UTC: oom"


@pytest.mark.parametrize("key", [None, ""])
def test_a_service_without_the_key_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key is None:
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
    else:
        monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(StartError, match="--wandb-mode online: the variable WANDB_API_KEY of the service is not set"):
        open_sinks(Settings(tmp_path, wandb_dir=tmp_path, wandb_mode="online"))
    with pytest.raises(StartError, match="set --wandb-dir"):
        open_sinks(Settings(tmp_path, wandb_mode="online"))
    (sink,) = open_sinks(Settings(tmp_path, wandb_dir=tmp_path))
    assert sink.name == "wandb"
