"""Agents on nodes that lack the job's code, or have it of their own; the ranks are stand-ins without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet_contract.code import tree
from ratchet_contract.code.archive import write_archive
from ratchet_contract.phases import Cause
from ratchet_contract.spec.job import Resolved
from ratchet_service.user_code.snapshot import snapshot
from tests.support.attempts import RESOLVED, Attempt, process_environment
from tests.support.server import wait_for


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "mine"
    root.mkdir()
    (root / "train.py").write_text("print(1)\n")
    return root


@pytest.fixture
def attempts() -> Iterator[list[Attempt]]:
    made: list[Attempt] = []
    yield made
    for attempt in made:
        attempt.close()


def resolved(digest: str | None) -> Resolved:
    return RESOLVED.model_copy(update={"code_digest": digest})


def test_code_is_fetched_once_service_is_back_and_only_if_digest_matches(
    project: Path, tmp_path: Path, attempts: list[Attempt]
) -> None:
    digest = snapshot(project, tmp_path / "code")
    sent = b"".join(write_archive(tree.list_entries(tmp_path / "code" / digest)))

    def attempt(name: str, blobs: dict[str, bytes], **policy: Any) -> Attempt:
        node = tmp_path / name
        made = Attempt(
            node,
            [{"steps": 3}],
            spec={"policy": policy},
            resolved=resolved(digest),
            code_dir=str(node / "code" / digest),
        )
        made.launch = made.launch.model_copy(update={"workdir": str(made.home.job("job-1").work_dir)})
        made.paths.launch_file.write_text(made.launch.model_dump_json())
        made.service.blobs = blobs
        attempts.append(made)
        return made

    good = attempt("good", {digest: sent})
    good.service.cut_short = 2
    wrong = attempt("wrong", {digest: b"".join(write_archive([]))})
    gone = attempt("gone", {})
    away = attempt("away", {}, startup_deadline=1.0)
    good.start()
    away.start()
    wait_for(lambda: (tmp_path / "good" / "jobs").exists(), "the agent to look for a service")
    for each in (good, wrong, gone):
        each.service.start()
    wrong.start()
    gone.start()
    for each in attempts:
        agent = each.agents[-1]
        wait_for(lambda agent=agent: agent.poll() is not None, "the agent to end")  # type: ignore[misc]

    assert good.result().cause is Cause.COMPLETED, good.log()
    assert (tmp_path / "good" / "code" / digest / "train.py").read_text() == "print(1)\n"
    assert (good.home.job("job-1").work_dir / "train.py").stat().st_mode & 0o777 == 0o644  # the ranks' own copy
    assert (good.service.cut_short, good.service.given) == (0, 1)
    for each, says in (
        (wrong, "its digest is"),
        (gone, "code-not-found"),
        (away, "startup_deadline (1 s): no service is known"),
    ):
        result = each.result()
        assert (result.cause, result.ranks) == (Cause.LAUNCHER_ERROR, []), result
        assert says in (result.message or "") and digest[:16] in (result.message or ""), result.message
        assert not (each.home.code / digest).exists() and list(each.home.code.glob("*")) == []


def test_file_of_start_from_that_cannot_be_fetched_is_named(tmp_path: Path, attempts: list[Attempt]) -> None:
    digest = "5a17" * 16
    for name, deadline, cut_short in (("gone", 60.0, 0), ("cut", 1.0, 10**6)):
        node = tmp_path / name
        attempt = Attempt(
            node,
            [{}],
            spec={"policy": {"startup_deadline": deadline}, "start_from": {"path": str(tmp_path / "w.safetensors")}},
            resolved=RESOLVED.model_copy(update={"start_digest": digest}),
            start_file=str(node / "code" / digest / "w.safetensors"),
        )
        attempt.service.blobs, attempt.service.cut_short = {digest: b"1234"} if cut_short else {}, cut_short
        attempts.append(attempt)
        attempt.service.start()
        attempt.start()
        result = attempt.wait()
        message = result.message or ""
        assert (result.cause, result.ranks) == (Cause.LAUNCHER_ERROR, []), result
        assert message.startswith(f"the file of start_from with the digest {digest[:16]}"), message
        assert "the code" not in message and ("cut short" if cut_short else "code-not-found") in message


def test_code_present_on_nodes_is_used_in_place_and_digested(
    project: Path, tmp_path: Path, attempts: list[Attempt]
) -> None:
    def attempt(name: str, path: Path) -> Attempt:
        spec = {"code": {"path": str(path), "source": "nodes"}, "script": ["train.py"], "task": None}
        attempts.append(Attempt(tmp_path / name, [{}], spec=spec, code_dir=str(path)))
        attempts[-1].start()
        return attempts[-1]

    here, missing = attempt("here", project), attempt("missing", tmp_path / "elsewhere")
    here.wait_step(0)
    env = process_environment(here.pid_of(0))
    assert env["RATCHET_CODE_DIGEST"] == tree.tree_digest(tree.list_entries(project))
    result = missing.wait()
    assert result.cause is Cause.USER_ERROR
    assert f"node 0 has no directory {tmp_path / 'elsewhere'}" in (result.message or "")
