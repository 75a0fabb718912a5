"""Histories of a real cluster, as ``recordings/*.jsonl.gz`` hold them.

Recorded from a 1.36 API server, scheduler and Job controller, with pods run as processes by a stand-in for the kubelet (so what
pods say of themselves is not a kubelet's word). One JSON object a line: ``t`` (seconds), ``src`` and either a call (method, path,
body, status, object: the answer) or what a watch saw of jobs and pods (type, object). Pods' last deletions were not recorded.
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.kube.store import Object

DIRECTORY = Path(__file__).with_name("recordings")
SCENARIOS = (
    "complete", "fail_exit1", "failjob_exit78", "evict_one", "delete_running", "suspend_resume", "created_suspended_then_quota",
)  # fmt: skip
_MOMENTARY = ("active", "ready", "terminating")


@dataclass(frozen=True)
class Call:
    """``at``: seconds since the Job was posted."""

    at: float
    method: str
    path: str
    body: Any


@dataclass(frozen=True)
class Seen:
    """What a watch saw of one object."""

    at: float
    kind: str
    type: str
    object: Object


def history(scenario: str) -> list[Call | Seen]:
    """In the order of the recording."""
    lines = gzip.decompress((DIRECTORY / f"{scenario}.jsonl.gz").read_bytes()).splitlines()
    entries = [json.loads(line) for line in lines]
    start = next(e["t"] for e in entries if e["src"] == "call")
    return [_entry(e, e["t"] - start) for e in entries]


def _entry(entry: dict[str, Any], at: float) -> Call | Seen:
    if entry["src"] == "call":
        return Call(at, entry["method"], entry["path"], entry["body"])
    return Seen(at, entry["src"], entry["type"], entry["object"])


# --- what of an object does not depend on chance -----------------------------------------------------------------------


def keys(seen: list[Seen]) -> dict[str, str]:
    """By the names of pods: their index, with how many that index had before."""
    found: dict[str, str] = {}
    for event in seen:
        name = event.object["metadata"]["name"]
        if event.kind == "pod" and name not in found:
            index = event.object["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
            found[name] = f"{index}.{sum(n.startswith(f'{index}.') for n in found.values())}"
    return found


def self_ended_pods(entries: list[Call | Seen]) -> dict[int, list[str]]:
    """The pods that ended with nobody's deleting them, by their keys; those between which nothing was told of the Job together,
    at the first one's place among the entries."""
    names, known = keys([entry for entry in entries if isinstance(entry, Seen)]), set[str]()
    found: dict[int, list[str]] = {}
    first: int | None = None
    for i, entry in enumerate(entries):
        if isinstance(entry, Call) or entry.kind == "job":
            first = None
            continue
        key, ended = names[entry.object["metadata"]["name"]], entry.object["status"]["phase"] in ("Succeeded", "Failed")
        if ended and key not in known and "deletionTimestamp" not in entry.object["metadata"]:
            known.add(key)
            first = i if first is None else first
            found.setdefault(first, []).append(key)
    return found


def object_states(seen: list[Seen]) -> dict[str, list[Any]]:
    """The states that each object went through, without repetitions: ``job``, and pods by their ``keys``. Names, uids, times,
    versions, nodes and addresses are left out; so is how many pods run, but of a Job's last state: it depends on how quickly
    processes come and go."""
    names = keys(seen)
    out: dict[str, list[Any]] = {}
    for event in seen:
        key = "job" if event.kind == "job" else names[event.object["metadata"]["name"]]
        if event.kind == "pod" and event.type == "DELETED":
            continue
        state = [event.type == "DELETED", *(_job(event.object) if event.kind == "job" else _pod(event.object))]
        if not out.setdefault(key, []) or out[key][-1] != state:
            out[key].append(state)
    *earlier, last = out.get("job") or [None]
    lasting = [[{k: v for k, v in part.items() if k not in _MOMENTARY} if isinstance(part, dict) else part for part in s]
               for s in earlier]  # fmt: skip
    return out | {"job": [*(s for i, s in enumerate(lasting) if s not in lasting[max(i - 1, 0) : i]), last]}


def _job(job: Object) -> list[Any]:
    status = {k: v for k, v in job["status"].items() if k not in ("conditions", "startTime", "completionTime")}
    uncounted = status.pop("uncountedTerminatedPods", None)
    started, completed = "startTime" in job["status"], "completionTime" in job["status"]
    counts = {k: len(v) for k, v in (uncounted or {}).items()}
    return [job["spec"]["suspend"], status, counts, started, completed, _conditions(job)]


def _pod(pod: Object) -> list[Any]:
    metadata, status = pod["metadata"], pod["status"]
    states = [_state(c["state"]) for c in status.get("containerStatuses", ())]
    ended = [metadata.get("finalizers"), metadata.get("deletionGracePeriodSeconds"), "deletionTimestamp" in metadata]
    return [status["phase"], "nodeName" in pod["spec"], *ended, states, "podIP" in status, _conditions(pod)]


def _state(state: Object) -> Any:
    ((name, detail),) = state.items()
    return name, detail.get("exitCode"), detail.get("reason")


def _conditions(made: Object) -> list[Any]:
    found = made["status"].get("conditions", ())
    return [(c["type"], c["status"], c.get("reason"), _anonymous(c.get("message"), made)) for c in found]


def _anonymous(message: str | None, made: Object) -> str | None:
    """Pods' names have five letters of chance at their end."""
    return None if message is None else re.sub(r"(?<=-\d-)[a-z0-9]{5}\b", "*", message)
