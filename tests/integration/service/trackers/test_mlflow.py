"""Runs in a real MLflow server: every point once, whatever breaks between the service and the server."""

from __future__ import annotations

import base64
import math
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from ratchet_service.trackers import mlflow as mlflow_module
from ratchet_service.trackers.mlflow import MlflowSink
from ratchet_service.trackers.sink import Batch, End, Note, Point, Run, TrackerError
from tests.support.mlflow_server import MlflowServer
from tests.support.receiver import receiving

pytestmark = pytest.mark.processes
BEGIN = datetime(2030, 1, 1, 12, tzinfo=UTC)
NOTHING = Batch([], [], None)


class Mlflow(MlflowServer):
    """With what the tests read from it."""

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        answer = httpx.request(method, f"{self.url}/api/2.0/mlflow/{path}", **arguments)
        return answer.raise_for_status().json()

    def run(self, run_id: str) -> Any:
        return self.call("GET", "runs/get", params={"run_id": run_id})["run"]

    def tags(self, run_id: str) -> dict[str, str]:
        return {one["key"]: one["value"] for one in self.run(run_id)["data"]["tags"]}

    def runs_of(self, name: str) -> list[str]:
        """Ids of the runs for a job, the deleted ones too."""
        body = {"experiment_ids": [self.experiment("digits")], "run_view_type": "ALL"}
        found = self.call("POST", "runs/search", json=body | {"filter": f"tags.`ratchet.run` = '{name}'"})
        return [one["info"]["run_id"] for one in found.get("runs", [])]

    def experiment(self, name: str) -> str:
        found = self.call("GET", "experiments/get-by-name", params={"experiment_name": name})
        return str(found["experiment"]["experiment_id"])

    def history(self, run_id: str, name: str) -> list[tuple[int, float, int]]:
        """Step, value and time in ms of each stored point, by MLflow's own client."""
        points = self._client().get_metric_history(run_id, name)
        return sorted((one.step, one.value, one.timestamp) for one in points)

    def _client(self) -> Any:
        with warnings.catch_warnings():  # of mlflow and what it imports
            warnings.simplefilter("ignore")
            from mlflow import MlflowClient
        return MlflowClient(self.url)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlflow]:
    server = Mlflow(tmp_path_factory.mktemp("mlflow"))
    yield server
    server.kill()


@pytest.fixture
def server(shared: Mlflow) -> Mlflow:
    """It runs, even if another test has killed it."""
    if not shared.runs:
        shared.start()
    return shared


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """A run of a job that no other test has."""
    job = "job-" + "".join(one if one.isalnum() else "-" for one in request.node.name)
    return Run(job, 1, "my digits", "ann", "digits", {}, {}, BEGIN)


def points(steps: range, name: str = "loss") -> list[Point]:
    return [Point(name, step, 1 / (step + 1), BEGIN + timedelta(milliseconds=37 * step)) for step in steps]


def stored(made: list[Point]) -> list[tuple[int, float, int]]:
    return [(one.step, one.value, round(one.at.timestamp() * 1000)) for one in made]


def test_a_run_has_the_names_parameters_labels_and_commit_of_its_job(server: Mlflow, run: Run) -> None:
    parameters = {f"spec.key{number}": str(number) for number in range(300)}
    parameters |= {
        "code.git.commit": "a" * 40,
        "long": "x" * 7000,
        "script --lr=1": "odd",
        "/": "path",
        "k" * 300: "long key",
    }
    run = replace(run, labels={"team": "vision", "mlflow.user": "eve", "../x": "y"}, parameters=parameters)
    state = MlflowSink(server.url).export(run, {}, NOTHING)
    found = server.run(state["run_id"])
    assert (found["info"]["run_name"], found["info"]["status"]) == ("my digits", "RUNNING")
    assert found["info"]["start_time"] == int(BEGIN.timestamp() * 1000)
    seen = {one["key"]: one["value"] for one in found["data"]["params"]}
    assert len(seen) == len(parameters)
    assert seen["spec.key299"] == "299"
    assert len(seen["long"]) == 6000
    assert seen["long"].endswith("... (cut)")
    tags = server.tags(state["run_id"])
    named = {value: seen[key.removeprefix("ratchet.name.")] for key, value in tags.items() if "ratchet.name." in key}
    assert named == {"script --lr=1": "odd", "/": "path", "k" * 300: "long key"}
    assert tags["team"] == "vision"
    assert tags["mlflow.user"] == tags["ratchet.owner"] == "ann"
    assert tags["label.mlflow.user"] == "eve"
    assert tags["mlflow.source.git.commit"] == "a" * 40
    assert httpx.get(state["url"]).status_code == 200
    assert state["url"].endswith(f"/experiments/{server.experiment('digits')}/runs/{state['run_id']}")


def test_requests_stay_below_the_bytes_that_a_server_takes(
    server: Mlflow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, sizes = httpx.Client.send, []

    def send_and_measure(client: httpx.Client, request: httpx.Request, **arguments: Any) -> httpx.Response:
        sizes.append(len(request.read()))
        return send(client, request, **arguments)

    long = {f"key{number}": "ü" * 6000 for number in range(150)}
    with monkeypatch.context() as patch:
        patch.setattr(httpx.Client, "send", send_and_measure)
        state = MlflowSink(server.url).export(replace(run, parameters=long), {}, NOTHING)
    assert max(sizes) < 1_000_000 < sum(sizes)  # MAX_BATCH_LOG_REQUEST_SIZE
    assert len(server.run(state["run_id"])["data"]["params"]) == 150


def test_every_point_is_stored_once_with_its_time_even_if_a_batch_is_repeated(server: Mlflow, run: Run) -> None:
    sink, made = MlflowSink(server.url), points(range(2500))
    state = sink.export(run, {}, NOTHING)
    for batch in (made[:2100], made[:2100], made[2100:]):
        state = sink.export(run, state, Batch(batch, [], None))
    assert server.history(state["run_id"], "loss") == stored(made)


@pytest.mark.parametrize("answered", [True, False])
def test_a_server_that_is_killed_in_a_batch_has_each_point_once_after_the_repeat(
    server: Mlflow, run: Run, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the first of three requests, or after it has stored the second, and before its answer is read."""
    sink, made = MlflowSink(server.url), points(range(2500))
    state = sink.export(run, {}, NOTHING)
    send, sent = httpx.Client.send, []

    def send_and_kill(client: httpx.Client, request: httpx.Request, **arguments: Any) -> httpx.Response:
        answer = send(client, request, **arguments)
        sent.append(request)
        if len(sent) == (1 if answered else 2):
            answer.read()
            server.kill()
            if not answered:
                answer.close()
                raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return answer

    with monkeypatch.context() as patch, pytest.raises(TrackerError, match="check that the server runs"):
        patch.setattr(httpx.Client, "send", send_and_kill)
        sink.export(run, state, Batch(made, [], None))
    server.start()
    assert 0 < len(server.history(state["run_id"], "loss")) < 2500
    assert sink.export(run, state, Batch(made, [], None)) == state
    assert server.history(state["run_id"], "loss") == stored(made)


def test_a_run_whose_state_was_lost_after_its_creation_is_found(server: Mlflow, run: Run) -> None:
    run = replace(run, parameters={"lr": "0.1"})
    sink = MlflowSink(server.url)
    first = sink.export(run, {}, Batch(points(range(10)), [], None))
    newer = {"start_time": int(BEGIN.timestamp() * 1000) + 1, "tags": [{"key": "ratchet.run", "value": run.name}]}
    server.call("POST", "runs/create", json=newer | {"experiment_id": server.experiment("digits")})
    second = sink.export(run, {}, Batch(points(range(10)), [], None))
    assert first == second
    assert len(server.runs_of(run.name)) == 2  # none by the sink
    assert len(server.history(first["run_id"], "loss")) == 10


def test_a_branch_is_a_run_below_its_parent(server: Mlflow, run: Run) -> None:
    sink = MlflowSink(server.url)
    parent = sink.export(run, {}, NOTHING)
    branch = sink.export(replace(run, number=2, parent=run.name), {}, NOTHING)
    of_unknown = sink.export(replace(run, number=3, parent="job-of-another-tracker"), {}, NOTHING)
    assert server.tags(branch["run_id"])["mlflow.parentRunId"] == parent["run_id"]
    assert server.tags(branch["run_id"])["ratchet.parent"] == run.name
    assert "mlflow.parentRunId" not in server.tags(of_unknown["run_id"])
    assert server.tags(of_unknown["run_id"])["ratchet.parent"] == "job-of-another-tracker"


def test_values_that_are_no_numbers_are_stored_as_mlflow_stores_them(server: Mlflow, run: Run) -> None:
    sink = MlflowSink(server.url)
    values = [math.nan, math.inf, -math.inf, 0.0, 5e-324]
    made = [Point("loss", step, value, BEGIN) for step, value in enumerate(values)]
    state = sink.export(run, {}, Batch(made, [], None))
    sink.export(run, state, Batch(made, [], None))
    seen = [value for _, value, _ in server.history(state["run_id"], "loss")]
    assert len(seen) == 5
    assert math.isnan(seen[0])
    assert seen[1:] == [sys.float_info.max, -sys.float_info.max, 0.0, 5e-324]  # sanitize_metric_value of its SQL store


def test_names_that_mlflow_refuses_become_different_keys_and_are_kept_as_tags(server: Mlflow, run: Run) -> None:
    sink = MlflowSink(server.url)
    odd = [
        "loss%",
        "loss&",
        "/loss",
        "loss/",
        "a//b",
        "../up",
        ".",
        "",
        "loss\n",
        "n" * 300,
        "n" * 301,
        "<b>",
        "Verlust in €",
    ]
    plain = ["loss", "train/loss:0 a-b_c.d", "größe"]
    sink_state = sink.export(run, {}, Batch([Point(one, 1, 1.0, BEGIN) for one in odd + plain], [], None))
    first = server.run(sink_state["run_id"])
    keys = [one["key"] for one in first["data"]["metrics"]]
    assert len(keys) == len(odd + plain)
    assert set(plain) < set(keys)
    original = {
        key.removeprefix("ratchet.name."): value
        for key, value in server.tags(sink_state["run_id"]).items()
        if key.startswith("ratchet.name.")
    }
    assert sorted(original.values()) == sorted(odd)
    assert set(original) == set(keys) - set(plain)
    clash = next(iter(original))  # a script may use such a key as a name
    sink.export(run, sink_state, Batch([Point(clash, 1, 2.0, BEGIN)], [], None))
    assert len(server.run(sink_state["run_id"])["data"]["metrics"]) == len(keys) + 1


def test_notes_are_the_description_and_the_oldest_leave_it_when_it_is_full(server: Mlflow, run: Run) -> None:
    sink = MlflowSink(server.url)
    text = "attempt 1 ended: oom:\nrank 1"
    first = Batch([], [Note(1, 40, BEGIN, text)], None)
    state = sink.export(run, {}, first)
    assert sink.export(run, {}, first) == state  # repeated
    line = "- step 40, 2030-01-01 12:00:00 UTC: attempt 1 ended: oom: rank 1"
    assert server.tags(state["run_id"])["mlflow.note.content"] == line
    state = sink.export(run, state, Batch([], [Note(2, 50, BEGIN, "x" * 5000)], None))
    shown = server.tags(state["run_id"])["mlflow.note.content"].splitlines()
    assert shown[0] == line
    assert shown[1].endswith("x... (cut)")
    many = [Note(3 + number, number, BEGIN, f"attempt {number} " + "x" * 90) for number in range(200)]
    state = sink.export(run, state, Batch([], many, None))
    shown = server.tags(state["run_id"])["mlflow.note.content"].splitlines()
    assert "attempt 199 " in shown[-1]
    assert shown[0] == f"({202 - len(shown) + 2} earlier notes left out)"


@pytest.mark.parametrize(
    ("phase", "status"), [("SUCCEEDED", "FINISHED"), ("FAILED", "FAILED"), ("CANCELLED", "KILLED")]
)
def test_the_end_has_the_status_the_summary_and_the_checkpoint(
    server: Mlflow, run: Run, phase: str, status: str
) -> None:
    sink, at = MlflowSink(server.url), BEGIN + timedelta(hours=1)
    last = Batch(points(range(3)), [], End(phase, at, {"goodput": 0.97, "lost steps": 12.0}, "/jobs/x/step-90"))
    state = sink.export(run, {}, last)
    assert sink.export(run, state, last) == state
    info = server.run(state["run_id"])["info"]
    assert (info["status"], info["end_time"]) == (status, int(at.timestamp() * 1000))
    assert server.history(state["run_id"], "ratchet/goodput") == [(0, 0.97, int(at.timestamp() * 1000))]
    assert len(server.history(state["run_id"], "loss")) == 3
    assert server.tags(state["run_id"])["ratchet.checkpoint"] == "/jobs/x/step-90"


def test_a_run_that_a_user_deleted_is_named_with_its_cure(server: Mlflow, run: Run) -> None:
    sink = MlflowSink(server.url)
    state = sink.export(run, {}, NOTHING)
    server.call("POST", "runs/delete", json={"run_id": state["run_id"]})
    with pytest.raises(TrackerError, match=f"mlflow runs restore --run-id {state['run_id']}"):
        sink.export(run, state, Batch(points(range(3)), [], None))
    server.call("POST", "runs/restore", json={"run_id": state["run_id"]})
    sink.export(run, state, Batch(points(range(3)), [], None))
    with pytest.raises(TrackerError, match="was deleted in MLflow"):
        sink.export(run, {**state, "run_id": "0" * 32}, Batch(points(range(3)), [], None))


def test_an_experiment_that_a_user_deleted_is_named_with_its_cure(server: Mlflow, run: Run) -> None:
    made = server.call("POST", "experiments/create", json={"name": "gone"})["experiment_id"]
    server.call("POST", "experiments/delete", json={"experiment_id": made})
    with pytest.raises(TrackerError, match=f"mlflow experiments restore --experiment-id {made}"):
        MlflowSink(server.url).export(replace(run, experiment="gone"), {}, NOTHING)


def test_a_server_that_is_away_is_named_without_the_credentials(run: Run) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(
            TrackerError, match=f"MLflow at http://{address}: ConnectError: .*: check that the server"
        ) as caught:
            MlflowSink(f"http://eve:s3cret@{address}").export(run, {}, NOTHING)
    assert "s3cret" not in str(caught.value)


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("variables", "sent"),
    [
        ({}, basic("bob:ey/e")),
        ({"USERNAME": "ann", "PASSWORD": "pw", "TOKEN": "tok"}, basic("ann:pw")),
        ({"USERNAME": "ann", "TOKEN": "tok\n"}, "Bearer tok"),
    ],
)
def test_refused_credentials_are_those_of_mlflows_client_and_the_error_names_the_cure(
    run: Run, variables: Mapping[str, str], sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is an HTTP server that answers 401: MLflow's own check of users needs another package."""
    for name, value in variables.items():
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)
    with receiving(lambda _: "401") as receiver:
        uri = receiver.url.replace("//", "//bob:ey%2Fe@").removesuffix("/hook")
        with pytest.raises(TrackerError, match=r"answered 401.*set MLFLOW_TRACKING_USERNAME") as caught:
            MlflowSink(uri).export(run, {}, NOTHING)
    headers = {name.lower(): value for name, value in receiver.requests[0].headers.items()}
    assert headers["authorization"] == sent
    assert not any(secret in str(caught.value) for secret in ("ey/e", "ey%2Fe", "pw", "tok"))


def test_a_token_that_no_header_can_have_is_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3c\nret")
    with pytest.raises(TrackerError, match="MLFLOW_TRACKING_TOKEN has characters") as caught:
        MlflowSink("http://127.0.0.1:1").export(run, {}, NOTHING)
    assert "s3c" not in str(caught.value)


@pytest.mark.parametrize(("behave", "said"), [("redirect", "redirects are not followed"), ("200", "answered 200")])
def test_an_address_that_is_no_mlflow_server_is_refused(run: Run, behave: str, said: str) -> None:
    with receiving(lambda _: behave) as receiver, pytest.raises(TrackerError, match=said):
        MlflowSink(receiver.url).export(run, {}, NOTHING)
    assert len(receiver.requests) == 1


@pytest.mark.parametrize("behave", ["hang", "drip"])
def test_a_server_that_does_not_end_its_answer_is_given_up(
    run: Run, behave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_module, "_SECONDS", 0.5)
    with receiving(lambda _: behave) as receiver, pytest.raises(TrackerError, match="Timeout"):
        MlflowSink(receiver.url).export(run, {}, NOTHING)
