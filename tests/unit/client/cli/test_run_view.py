"""What ``ratchet run`` does while its service does not respond."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet_client.cli.commands import wait
from ratchet_client.cli.run import private_service
from ratchet_client.cli.run.private_service import RunService
from ratchet_client.cli.run.view import RunView
from ratchet_client.cli.shared.job_figures import Snapshot
from ratchet_client.cli.shared.service_process import CannotStart
from ratchet_client.http.errors import ServiceUnreachable
from ratchet_contract.api.views import JobView
from ratchet_contract.paths import HomePaths
from tests.support.scripted_server import JOB

pytestmark = pytest.mark.processes

SNAPSHOT = Snapshot(JobView.model_validate(JOB), None, (), None)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunService:
    """A private service whose process only sleeps."""
    monkeypatch.setattr(private_service, "_CLOSED_SECONDS", 0.05)
    made = RunService(HomePaths(tmp_path), private=True)
    made._process = subprocess.Popen(["sleep", "60"])
    return made


def end(service: RunService) -> None:
    assert service._process is not None
    service._process.kill()
    service._process.wait()


def follow(service: RunService, looks: list[Callable[[], object]]) -> None:
    """Follow a job as ``ratchet run`` does. Each of ``looks`` is what one poll of the job returns, or its error."""
    left = iter(looks)
    view = RunView(service.paths.job(str(JOB["id"])), None, str, service.restart_if_ended, lambda _: None)

    def fetch() -> Snapshot:
        next(left)()
        return SNAPSHOT

    found = wait.poll(fetch, 0.0, view.on_disconnect)
    for _ in range(sum(look is answers for look in looks)):
        view.on_progress(next(found))


def answers() -> None:
    pass


def is_silent() -> None:
    raise ServiceUnreachable("no answer")


def test_service_that_hangs_and_then_ends_is_restarted(service: RunService, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[bool] = []
    monkeypatch.setattr(service, "start", lambda: starts.append(True))

    def ends() -> None:
        end(service)
        is_silent()

    follow(service, [answers, is_silent, is_silent, ends, answers])
    assert starts == [True]


def test_failed_restart_is_tried_again_after_a_while(
    service: RunService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, starts = [1000.0], []
    monkeypatch.setattr(private_service, "time", SimpleNamespace(monotonic=lambda: now[0]), raising=False)

    def start() -> None:
        starts.append(now[0])
        if len(starts) < 3:
            raise CannotStart("no port")

    monkeypatch.setattr(service, "start", start)
    end(service)
    for now[0] in (1000.0, 1001.0, 1009.0, 1010.0, 1012.0, 1021.0):
        assert service.restart_if_ended()
    assert starts == [1000.0, 1010.0, 1021.0] and capsys.readouterr().err.count("it does not start: no port") == 2


def test_service_that_hangs_is_reported_once_each_time(service: RunService, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        follow(service, [answers, is_silent, is_silent, answers, is_silent, is_silent, answers])
    finally:
        end(service)
    assert capsys.readouterr().err.count("no answer. Retrying") == 2


def test_poll_calls_again_only_what_asks_for_it() -> None:
    for again, expected in ((True, 3), (False, 1), (None, 1)):
        looks, calls = iter([answers, is_silent, is_silent, is_silent, answers]), []

        def fetch(looks: object = looks) -> None:
            next(looks)()  # type: ignore[call-overload]

        def gap(detail: str, again: object = again, calls: list[str] = calls) -> object:
            calls.append(detail)
            return again

        found = wait.poll(fetch, 0.0, gap)
        next(found), next(found)
        assert len(calls) == expected
