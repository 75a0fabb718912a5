"""An alert of a real job reaches a webhook once, though its step is done again after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook as Verifier

from tests.support.receiver import receiving
from tests.support.server import Server, rank_pid, wait_for

pytestmark = pytest.mark.processes
SCRIPT = """
import time
from pathlib import Path
import torch
from torch import nn
from ratchet import Session

gate = Path("{gate}")
with Session() as session:
    net = nn.Linear(4, 2)
    model = session.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.register(optimizer=optimizer)
    for step in session.steps(12):
        model(torch.full((1, 4), float(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 7:
            session.alert("loss is high", f"rank {session.rank}, {time.time()}", level="warning")
            gate.with_name(f"alerted-{session.rank}").write_bytes(b"")
            while not gate.exists():
                time.sleep(0.01)
"""


def test_alert_of_a_step_that_is_redone_after_a_kill_is_one_event_and_one_delivery(tmp_path: Path) -> None:
    code, gate = tmp_path / "code", tmp_path / "gate"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT.replace("{gate}", str(gate)))
    server = Server(tmp_path / "home", "--webhook-network", "127.0.0.0/8")
    spec = {
        "name": "alerts",
        "script": ["train.py"],
        "code": {"path": str(code)},
        "world": {"ranks_per_node": 2},
        "checkpoint": {"every_steps": 5},
        "policy": {"backoff": 0.1},
    }

    def alerts(job_id: str) -> list[dict[str, Any]]:
        return [event for event in server.events(job_id) if event["type"] == "alert"]

    try:
        server.start()
        with receiving() as receiver:
            made = server.call("POST", "/v1/webhooks", json={"url": receiver.url}).json()
            slack = {"url": receiver.url, "format": "slack", "types": ["job.alert"]}
            server.call("POST", "/v1/webhooks", json=slack)
            job_id = server.submit(spec)
            wait_for(lambda: len(alerts(job_id)) == 2, "the alerts of both ranks", 90)
            _, paths = server.wait_step(job_id, 7)
            os.kill(rank_pid(paths, 1), signal.SIGKILL)
            wait_for(lambda: len(server.attempts(job_id)) == 2, "the next attempt", 60)
            for rank in (0, 1):
                (tmp_path / f"alerted-{rank}").unlink()
            wait_for(lambda: len([*tmp_path.glob("alerted-*")]) == 2, "the step of the alert to be redone", 60)
            gate.touch()
            server.wait_phase(job_id, "SUCCEEDED")
            wait_for(lambda: "job.succeeded" in {one.json.get("type") for one in receiver.accepted()}, "the end", 60)
            wait_for(lambda: sum("text" in one.json for one in receiver.accepted()) >= 2, "both in Slack", 60)
            requests = receiver.accepted()
        first, second = server.attempts(job_id)
        assert first["cause"] == "rank-killed" and second["base"]["step"] < 8, "the step was redone"
        stored = alerts(job_id)
    finally:
        server.stop()
    assert sorted(one["data"]["rank"] for one in stored) == [0, 1], stored
    assert {(one["attempt"], one["data"]["step"], one["data"]["level"]) for one in stored} == {(1, 8, "warning")}
    sent = [one for one in requests if one.json.get("type") == "job.alert"]
    assert sorted(one.json["data"]["details"]["rank"] for one in sent) == [0, 1]
    for one in sent:
        Verifier(made["secret"]).verify(one.body, one.headers)
        details = one.json["data"]["details"]
        assert one.json["data"]["message"] == f"loss is high: {details['text']}"
    texts = [one.json["text"] for one in requests if "text" in one.json]
    assert len(texts) == 2 and all(text.startswith("alert: loss is high: rank ") for text in texts)
    assert all(text.endswith(f"(warning, step 8 of alerts, {job_id}, local)") for text in texts), texts
