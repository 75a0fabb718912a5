"""The nodes: pods that are bound to one become real processes of this machine, and their ends become the pods' states."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.kube.containers import CannotStart, Images, Orders
from tests.support.kube.jobs import ENDED, warn
from tests.support.kube.store import PODS, ApiError, Object, Store, now


@dataclass
class Running:
    """A container whose first process was started. ``due``: when it is killed; ``oom``: it was killed for its memory."""

    started: str
    node: str
    due: float | None = None
    oom: bool = False


class Kubelet:
    """All nodes' kubelets. ``claims``: directory of each PersistentVolumeClaim; ``lost``: nodes that tell and hear nothing."""

    def __init__(self, store: Store, directory: Path, claims: dict[str, Path]) -> None:
        self._store, self._directory = store, directory
        self.images, self.lost = Images(), set[str]()
        self._orders = Orders(store, directory, claims, self.images)
        self._running: dict[str, Running] = {}
        self._ended: dict[str, int] = {}
        self._failed: dict[str, str] = {}
        self._lock = threading.RLock()
        (directory / "logs").mkdir(parents=True)
        command = [sys.executable, "-S", "-E", str(Path(__file__).with_name("pod_processes.py"))]
        self._engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._engine.stdout is not None
        self._orders.isolates = json.loads(self._engine.stdout.readline())["isolates"]
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    # --- the containers' processes -------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._engine.stdout is not None
        for line in self._engine.stdout:
            message = json.loads(line)
            with self._lock:
                if "exit" in message:
                    self._ended[message["id"]] = message["exit"]
                elif "error" in message:
                    self._failed[message["id"]] = message["error"]
            with self._store.changed:
                self._store.changed.notify_all()

    def _order(self, **order: Any) -> None:
        assert self._engine.stdin is not None
        self._engine.stdin.write(json.dumps(order).encode() + b"\n")

    def signal(self, uid: str, number: int) -> None:
        self._order(op="signal", id=uid, signal=number)

    def oom(self, uid: str) -> None:
        """The kernel ends the container for its memory."""
        with self._lock:
            self._running[uid].oom = True
        self.signal(uid, signal.SIGKILL)

    def close(self) -> None:
        """Every container's processes are gone afterwards."""
        assert self._engine.stdin is not None and self._engine.stdout is not None
        self._engine.stdin.close()
        self._engine.wait(30)
        self._reader.join(30)
        self._engine.stdout.close()

    # --- pods ----------------------------------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        return min((r.due for r in self._running.values() if r.due is not None), default=None)

    def has_news(self) -> bool:
        """True if ``sync_pods`` has an end to handle. Those of a lost machine wait until it is back."""
        uids = [*self._ended, *self._failed]
        return any((r := self._running.get(uid)) is not None and r.node not in self.lost for uid in uids)

    def sync_pods(self) -> None:
        """Look at every pod once."""
        pods = {p["metadata"]["uid"]: p for p in self._store.select(PODS) if "nodeName" in p["spec"]}
        with self._lock:
            for uid in [u for u, r in self._running.items() if u not in pods and r.node not in self.lost]:
                if self._ended.pop(uid, None) is None:
                    self.signal(uid, signal.SIGKILL)  # deleted without any grace
                del self._running[uid]
            for uid, pod in pods.items():
                if pod["spec"]["nodeName"] not in self.lost:
                    self._sync_pod(uid, pod)

    def _sync_pod(self, uid: str, pod: Object) -> None:
        wanted = "deletionTimestamp" not in pod["metadata"]
        if pod["status"]["phase"] in ENDED:
            if self._ended.pop(uid, None) is not None:  # after the pod's phase was set by somebody else
                self._running.pop(uid, None)
            if not wanted and not pod["metadata"].get("finalizers"):
                with suppress(ApiError):  # it may be gone
                    self._store.remove(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
        elif uid in self._ended:
            self._end(uid, pod, self._ended.pop(uid))
        elif uid in self._failed:
            self._waiting(pod, "CreateContainerError", self._failed.pop(uid))
            self._running.pop(uid, None)
        elif uid in self._running:
            self._wind_down(uid, pod, wanted)
        elif not wanted:
            self._update(pod, _terminate)  # no container of it ever ran
        elif not pod["status"].get("containerStatuses") or self._curable(pod):
            self._start(uid, pod)

    def _curable(self, pod: Object) -> bool:
        """It waits for an image that has come."""
        waiting = pod["status"]["containerStatuses"][0]["state"].get("waiting", {})
        image = pod["spec"]["containers"][0]["image"]
        return waiting.get("reason") == "ImagePullBackOff" and image not in self.images.missing

    def _start(self, uid: str, pod: Object) -> None:
        container = pod["spec"]["containers"][0]
        if container["image"] in self.images.missing:
            message = f'Failed to pull image "{container["image"]}": not found'
            warn(self._store, pod, "Failed", message)
            self._waiting(pod, "ErrImagePull", message)
            self._waiting(
                pod, "ImagePullBackOff", f'Back-off pulling image "{container["image"]}": ErrImagePull: not found'
            )
            return
        try:
            order = self._orders.start(pod)
        except CannotStart as error:
            warn(self._store, pod, "Failed", f"Error: {error.args[1]}")
            self._waiting(pod, error.args[0], error.args[1])
            return
        self._running[uid] = Running(now(), pod["spec"]["nodeName"])
        self._order(op="start", id=uid, **order)
        self._update(pod, self._run)

    def _wind_down(self, uid: str, pod: Object, wanted: bool) -> None:
        running = self._running[uid]
        if wanted:
            return
        if running.due is None:
            self.signal(uid, signal.SIGTERM)
        due = time.monotonic() + pod["metadata"]["deletionGracePeriodSeconds"]
        running.due = due if running.due is None else min(running.due, due)
        if time.monotonic() >= running.due:
            self.signal(uid, signal.SIGKILL)
            running.due = float("inf")

    def _run(self, pod: Object) -> None:
        at = self._running[pod["metadata"]["uid"]].started
        pod["status"] |= {"phase": "Running", "hostIP": "127.0.0.1", "podIP": "127.0.0.1", "startTime": at}
        pod["status"]["podIPs"] = [{"ip": "127.0.0.1"}]
        _ready(pod, "True")
        _state(pod, {"running": {"startedAt": at}}, ready=True)

    def _end(self, uid: str, pod: Object, code: int) -> None:
        running = self._running.pop(uid)
        reason = "OOMKilled" if running.oom else "Error" if code else "Completed"
        terminated = {"exitCode": code, "reason": reason, "startedAt": running.started, "finishedAt": now()}

        def change(made: Object) -> None:
            made["status"]["phase"] = "Failed" if code else "Succeeded"
            _ready(made, "False")
            _state(made, {"terminated": terminated}, ready=False)

        self._update(pod, change)

    def _waiting(self, pod: Object, reason: str, message: str) -> None:
        self._update(pod, lambda p: _state(p, {"waiting": {"reason": reason, "message": message}}, ready=False))

    def _update(self, pod: Object, change: Any) -> None:
        try:
            self._store.update(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], change)
        except ApiError as error:
            assert error.code == 404

    def log(self, namespace: str, name: str, query: dict[str, str]) -> bytes:
        """What the pod's container has printed; ``tailLines`` and ``limitBytes`` as the API has them."""
        pod = self._store.get(PODS, namespace, name)
        path = self._orders.log_file(pod["metadata"]["uid"])
        if not path.exists():
            container = pod["spec"]["containers"][0]["name"]
            states = pod["status"].get("containerStatuses") or [{"state": {"waiting": {"reason": "ContainerCreating"}}}]
            why = states[0]["state"].get("waiting", {}).get("reason", "ContainerCreating")
            message = f'container "{container}" in pod "{name}" is waiting to start: {why}'
            raise ApiError(400, "BadRequest", message)
        text = path.read_bytes()
        if "tailLines" in query:
            text = b"".join(text.splitlines(keepends=True)[-int(query["tailLines"]) :])
        return text[: int(query["limitBytes"])] if "limitBytes" in query else text


def _terminate(pod: Object) -> None:
    """As a kubelet since 1.27 does (``TerminatePod``): of a container that is not known to have ended it says so, also where
    it never began."""
    message = "The container could not be located when the pod was terminated"
    unknown = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": message}
    for status in pod["status"].get("containerStatuses", ()):
        status["state"] = {"terminated": unknown | {"startedAt": None, "finishedAt": None}}
    pod["status"]["phase"] = "Failed"


def _ready(pod: Object, status: str) -> None:
    """As recorded, Ready stands before the others."""
    ready = {"type": "Ready", "status": status, "lastProbeTime": None, "lastTransitionTime": now()}
    pod["status"]["conditions"] = [ready, *(c for c in pod["status"].get("conditions", ()) if c["type"] != "Ready")]


def _state(pod: Object, state: Object, ready: bool) -> None:
    container = pod["spec"]["containers"][0]
    made = {"name": container["name"], "state": state, "lastState": {}, "ready": ready, "restartCount": 0}
    made |= {"image": container["image"], "imageID": "", "started": ready}
    pod["status"]["containerStatuses"] = [made]
