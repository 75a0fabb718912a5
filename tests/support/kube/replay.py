"""A recorded history served to a launcher as if it befell the Job that it has just made.

The recordings' objects take the names, labels and container of that Job, and their times are counted from now; nothing else of
them is changed. What the launcher asks for meanwhile is answered by the store alone: no controller runs.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ratchet_contract.phases import Cause
from ratchet_contract.protocol.messages import AgentFile, AttemptResult
from ratchet_service.launchers.base import AttemptRef
from tests.support.kube.api import KubeServer
from tests.support.kube.defaults import INDEX
from tests.support.kube.recorded_histories import Seen, history
from tests.support.kube.store import JOBS, PODS, Object, Store

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


class Replay:
    """One scenario on a server of its own. ``play`` goes on with the history."""

    def __init__(self, scenario: str, directory: Path) -> None:
        self.store = Store()
        self.api = KubeServer(self.store)
        self.kubeconfig = self.api.kubeconfig(directory / "kubeconfig.yaml")
        self._recorded = f"g-{scenario.replace('_', '-')}"
        self._rest = [e for e in history(scenario) if isinstance(e, Seen)]
        self._ref: AttemptRef | None = None
        self._job: Object = {}

    def attach(self, ref: AttemptRef) -> None:
        """The Job of ``ref`` is there: it is the one that the history is about."""
        self._ref, self._job = ref, self.store.get(JOBS, "default", ref.name)
        first = _TIME.search(json.dumps(self._rest[0].object))
        assert first is not None
        self._shift = datetime.now(UTC) - datetime.strptime(first[0], _FORMAT).replace(tzinfo=UTC)

    def play(self, until: float) -> None:
        """What was seen up to ``until`` seconds after the Job was posted. A pod that succeeds has left its agent's last word."""
        while self._rest and self._rest[0].at <= until:
            event = self._rest.pop(0)
            made = self._renamed(event.object)
            if event.kind == "pod":
                self.store.put(event.type, PODS, "default", self._pod(made))
                if made["status"]["phase"] == "Succeeded":
                    self._last_word(int(made["metadata"]["annotations"][INDEX]))
            elif event.type != "ADDED":  # that was the launcher's own
                self.store.put(event.type, JOBS, "default", self._job_of(made))

    @property
    def has_ended(self) -> bool:
        return not self._rest

    def _renamed(self, recorded: Object) -> Object:
        assert self._ref is not None
        text = json.dumps(recorded).replace(self._recorded, self._ref.name)
        made: Object = json.loads(_TIME.sub(self._now, text))
        return made

    def _now(self, at: re.Match[str]) -> str:
        return (datetime.strptime(at[0], _FORMAT) + self._shift).strftime(_FORMAT)

    def _job_of(self, made: Object) -> Object:
        spec = self._job["spec"] | {"suspend": made["spec"]["suspend"]}
        metadata = self._job["metadata"] | {"generation": made["metadata"]["generation"]}
        return self._job | {"metadata": metadata, "spec": spec, "status": made["status"]}

    def _pod(self, made: Object) -> Object:
        template = self._job["spec"]["template"]
        name = template["spec"]["containers"][0]["name"]
        made["metadata"]["labels"] |= template["metadata"]["labels"]
        made["metadata"]["annotations"] |= template["metadata"].get("annotations") or {}
        made["metadata"]["ownerReferences"][0]["uid"] = self._job["metadata"]["uid"]
        made["spec"] = template["spec"] | {k: made["spec"][k] for k in ("nodeName", "hostname") if k in made["spec"]}
        for status in made["status"].get("containerStatuses", ()):
            status["name"] = name
        return made

    def _last_word(self, node: int) -> None:
        assert self._ref is not None
        paths = self._ref.paths.node(node)
        paths.root.mkdir(parents=True, exist_ok=True)
        paths.agent_file.write_text(AgentFile(pid=1, start_time=1, host="pod").model_dump_json())
        fields: dict[str, Any] = {"started_at": "2026-01-01T00:00:00Z", "ended_at": "2026-01-01T00:00:01Z", "ranks": []}
        result = AttemptResult(
            job_id=self._ref.job_id, attempt=self._ref.attempt, node=node, cause=Cause.COMPLETED, last_step=1, **fields
        )
        paths.result_file.write_text(result.model_dump_json())

    def close(self) -> None:
        self.api.close()
