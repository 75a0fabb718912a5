"""A fake of the part of W&B's HTTP interface that the package ``wandb`` uses for an online run. It is no W&B server.

It stores a run's history as W&B's file stream does: a line for each offset, and a line that is sent again at an offset replaces
the one before. A request that W&B would refuse, or that this fake does not know, is answered with an error, and is listed in
``refused``: a test asserts that this list is empty. Only the API key ``KEY`` is accepted, and only one entity exists.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

KEY: Final = "0123456789abcdef" * 2 + "01234567"
ENTITY: Final = "team"
_STREAM: Final = re.compile(rf"/files/{ENTITY}/([^/]+)/([^/]+)/file_stream")
_FILES: Final = ("wandb-history.jsonl", "wandb-summary.json")


@dataclass
class FakeRun:
    """A run. ``history``: its lines; ``state``: running, finished or failed; ``posts``: offset and number of the lines of each
    request that had some."""

    id: str
    project: str
    fields: dict[str, Any] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    summary: str = "{}"
    state: str = "running"
    files: dict[str, bytes] = field(default_factory=dict)
    posts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.history]

    @property
    def config(self) -> dict[str, Any]:
        return {key: one["value"] for key, one in json.loads(self.fields["config"]).items()}


class Refused(Exception):
    """A request that is answered with ``status``."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class FakeWandb:
    """The state of the fake. ``before`` and ``after`` are called with the path of each POST to a file stream, before and after
    its lines are stored; what they raise is the answer."""

    def __init__(self) -> None:
        self.url = ""
        self.runs: dict[tuple[str, str], FakeRun] = {}
        self.refused: list[str] = []
        self.operations: list[str] = []
        self.before: Callable[[str], None] = lambda _path: None
        self.after: Callable[[str], None] = lambda _path: None
        self._lock = threading.Lock()

    @property
    def run(self) -> FakeRun:
        (run,) = self.runs.values()
        return run

    def graphql(self, asked: dict[str, Any]) -> dict[str, Any]:
        found = re.search(r"\b(?:query|mutation)\s+(\w+)", asked["query"])
        name = found[1] if found else asked["query"][:80]
        variables = asked.get("variables") or {}
        answer = getattr(self, f"_{name}", None)
        if answer is None:
            raise Refused(400, f"unknown operation {name}: {asked['query']}")
        with self._lock:
            self.operations.append(name)
            return {"data": answer(variables)}

    def _ServerFeaturesQuery(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def _OrgFeatureFlags(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"organization": None}

    def _ServerInfo(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"cliVersionInfo": {"max_cli_version": "99.0.0"}, "latestLocalVersionInfo": None}}

    def _Viewer(self, _: dict[str, Any]) -> dict[str, Any]:
        viewer = {"id": "dXNlcg==", "entity": ENTITY, "username": "ann", "email": "", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}}

    def _GetDefaultEntity(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "dXNlcg==", "entity": ENTITY}}

    def _RunResumeStatus(self, asked: dict[str, Any]) -> dict[str, Any]:
        run = self._find(asked["entity"], asked["project"], asked["name"])
        place = {"id": "p", "name": asked["project"], "entity": {"id": "e", "name": ENTITY}}
        return {"model": None if run is None else {**place, "bucket": _bucket(run)}}

    def _UpsertBucket(self, asked: dict[str, Any]) -> dict[str, Any]:
        run = self._find(asked.get("entity"), asked["project"], asked["name"])
        inserted = run is None
        if run is None:
            run = self.runs[asked["project"], asked["name"]] = FakeRun(asked["name"], asked["project"])
        run.fields |= {key: value for key, value in asked.items() if value is not None}
        run.state = "running"
        place = {"id": "p", "name": run.project, "entity": {"id": "e", "name": ENTITY}}
        bucket = {**_bucket(run), "description": None, "sweepName": None, "project": place}
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _RunStoppedStatus(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"run": {"stopped": False}}}

    def _CreateRunFiles(self, asked: dict[str, Any]) -> dict[str, Any]:
        urls = [
            {"name": name, "uploadUrl": f"{self.url}/upload/{asked['project']}/{asked['run']}/{name}"}
            for name in asked["files"]
        ]
        return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": urls}}

    def _Run(self, asked: dict[str, Any]) -> dict[str, Any]:
        run = self._find(asked["entity"], asked["project"], asked["name"])
        if run is None:
            return {"project": {"run": None}}
        more = {"projectId": "1", "state": run.state, "sweepName": None, "systemMetrics": "{}", "historyKeys": {}}
        more |= {"user": {"name": "Ann", "username": "ann"}}
        return {"project": {"run": {**_bucket(run), **more}}}

    def _find(self, entity: str | None, project: str, name: str) -> FakeRun | None:
        if entity not in (None, "", ENTITY):
            raise Refused(404, f"no entity {entity}")
        return self.runs.get((project, name))

    def stream(self, path: str, sent: dict[str, Any]) -> None:
        match = _STREAM.fullmatch(path)
        run = self.runs.get((match[1], match[2])) if match else None
        if run is None:
            raise Refused(404, f"no run at {path}")
        if unknown := sent.keys() - {"files", "uploaded", "complete", "exitcode"}:
            raise Refused(400, f"unknown fields {unknown}")
        self.before(path)
        with self._lock:
            for name, chunk in sent.get("files", {}).items():
                if name not in _FILES:
                    raise Refused(400, f"unknown file {name}")
                self._store(run, name, chunk["offset"], chunk["content"])
            if sent.get("complete"):
                run.state = "finished" if sent["exitcode"] == 0 else "failed"
        self.after(path)

    def _store(self, run: FakeRun, name: str, offset: int, lines: list[str]) -> None:
        if not lines or any("\n" in line or not isinstance(json.loads(line), dict) for line in lines):
            raise Refused(400, f"{name}: not lines of JSON objects")
        if name == "wandb-summary.json":
            run.summary = lines[-1]
            return
        if offset > len(run.history):
            raise Refused(400, f"{name}: lines at {offset} after {len(run.history)}")
        run.history[offset : offset + len(lines)] = lines
        run.posts.append((offset, len(lines)))


def _bucket(run: FakeRun) -> dict[str, Any]:
    fields = run.fields
    config = json.loads(fields.get("config", "{}"))
    telemetry = config.get("_wandb", {}).get("value", {})
    return {
        "id": f"id-of-{run.id}",
        "name": run.id,
        "displayName": fields.get("displayName"),
        "config": fields.get("config"),
        "tags": fields.get("tags", []),
        "notes": fields.get("notes"),
        "summaryMetrics": run.summary,
        "logLineCount": 0,
        "eventsLineCount": 0,
        "historyLineCount": len(run.history),
        "historyTail": json.dumps(run.history[-1:]),
        "eventsTail": "[]",
        "wandbConfig": json.dumps({"t": telemetry["t"]} if "t" in telemetry else {}),
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeWandb

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_GET(self) -> None:
        self._answer(dict)

    def log_message(self, *_: object) -> None:
        pass

    def _post(self) -> dict[str, Any]:
        expected = "Basic " + base64.b64encode(f"api:{KEY}".encode()).decode()
        body = self._body()
        if self.headers.get("Authorization") != expected:
            raise Refused(401, "wrong API key")
        asked = json.loads(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        if self.path == "/graphql":
            return self.fake.graphql(asked)
        self.fake.stream(self.path, asked)
        return {"exitcode": None, "limits": {}}

    def _put(self) -> dict[str, Any]:
        _, kind, project, run, name = self.path.split("/", 4)
        if kind != "upload":
            raise Refused(404, f"no place {self.path}")
        self.fake.runs[project, run].files[name] = self._body()
        return {}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _answer(self, handle: Callable[[], dict[str, Any]]) -> None:
        try:
            status, answer = 200, handle()
        except Refused as error:
            status, answer = error.status, {"error": str(error)}
            if status < 500:
                self.fake.refused.append(f"{self.path}: {error}")
        except ConnectionError:
            self.close_connection = True
            return
        except Exception as error:
            status, answer = 400, {"error": repr(error)}
            self.fake.refused.append(f"{self.path}: {error!r}")
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that was killed in the middle of a request is expected."""


@contextmanager
def fake_wandb() -> Iterator[FakeWandb]:
    """Serve a fake during the block, on a free port."""
    fake = FakeWandb()
    handler = type("_OfFake", (_Handler,), {"fake": fake})
    with _Server(("127.0.0.1", 0), handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
