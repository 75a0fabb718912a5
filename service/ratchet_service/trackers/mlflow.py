"""Exports runs to an MLflow tracking server over its REST API. The package ``mlflow`` is not needed.

A repeated batch is stored once: the primary key of a metric is (key, timestamp, step, run, value, is_nan), so a point that is
sent again with its own time is the same row (mlflow/store/tracking/dbmodels/models.py, ``SqlMetric``); a parameter with the same
value is accepted (``_log_params`` in sqlalchemy_store.py); tags, status and end are replaced by the same values."""

from __future__ import annotations

import hashlib
import json
import math
import os
import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from ratchet_contract.phases import JobPhase
from ratchet_service.trackers.sink import Batch, End, Point, Run, State, TrackerError
from ratchet_service.trackers.text import cut, fitting, joined, note_line

if TYPE_CHECKING:
    import ssl

    import httpx

GIT_COMMIT: Final = "code.git.commit"
"""The parameter that is the commit of the code."""

# Limits of a server: mlflow/utils/validation.py.
_MAX_METRICS: Final = 1000  # MAX_METRICS_PER_BATCH
_MAX_PARAMS: Final = 100  # MAX_PARAMS_TAGS_PER_BATCH
_MAX_BYTES: Final = 900_000  # MAX_BATCH_LOG_REQUEST_SIZE is 1e6, with the id of the run and the names of the lists
_MAX_KEY: Final = 200  # MAX_ENTITY_KEY_LENGTH is 250, also of the tag that keeps the name of a renamed key
_MAX_PARAM_VALUE: Final = 6000  # MAX_PARAM_VAL_LENGTH
_MAX_TAG_VALUE: Final = 8000  # MAX_TAG_VAL_LENGTH
_VALID_KEY: Final = re.compile(r"[/\w.\- :]+")  # validate_param_and_metric_name, of servers that do not run on Windows
_RENAMED: Final = re.compile(r"-[0-9a-f]{12}\Z")

_SECONDS: Final = 30.0
"""For one request, from the connection to the end of the answer."""
_MAX_ANSWER: Final = 16 << 20
"""Bytes. The answer to a search has all parameters of the run."""
_STATUS: Final = {
    JobPhase.SUCCEEDED: "FINISHED",
    JobPhase.FAILED: "FAILED",
    JobPhase.CANCELLED: "KILLED",
}  # mlflow/entities/run_status.py
_CURES: Final = {
    401: "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, of the service",
    403: "give the service's user the permission to edit the experiment; MLflow checks the host name too (--allowed-hosts)",
    404: "check that the URI is that of an MLflow server, with its prefix if it has one",
}
_Json = dict[str, Any]


class MlflowSink:
    """Sends runs to the MLflow server at ``uri``. Its credentials are those of the service's environment, as MLflow's own client
    reads them (``http_request`` in mlflow/utils/rest_utils.py): MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, otherwise
    MLFLOW_TRACKING_TOKEN; without these, those in ``uri``."""

    name = "mlflow"

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        self._user, self._password = unquote(parts.username or ""), unquote(parts.password or "")
        # messages and logs have the URI without credentials
        self.uri = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")

    def export(self, run: Run, state: State, batch: Batch) -> State:
        """Create the run if ``state`` is empty, and send the batch. The state has ``url``, the page of the run."""
        with self._client() as client:
            server = _Server(client, self.uri)
            if not state:
                state = self._find_or_create(server, run)
            run_id = state["run_id"]
            server.log(run_id, "tags", _original_names({point.name for point in batch.points}))
            server.log(run_id, "metrics", [_metric(point) for point in batch.points])
            if batch.notes:
                lines = [*state["notes"], *map(note_line, batch.notes)]
                notes, left_out = fitting(lines, state["left_out"], _MAX_TAG_VALUE)
                state = {**state, "notes": notes, "left_out": left_out}
                server.log(run_id, "tags", _pairs({"mlflow.note.content": joined(notes, left_out)}))
            if batch.end is not None:
                _send_end(server, run_id, batch.end)
        return state

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        import httpx

        return httpx.create_ssl_context()

    @contextmanager
    def _client(self) -> Iterator[httpx.Client]:
        """Yield a client with the credentials. Raise ``TrackerError`` for a token that no header can have."""
        import httpx  # 25 ms of the start of a service that has no tracker

        headers = {"User-Agent": "Ratchet"}
        user, password, token = (
            os.environ.get(f"MLFLOW_TRACKING_{key}", "") for key in ("USERNAME", "PASSWORD", "TOKEN")
        )
        auth = None
        if user and password:
            auth = httpx.BasicAuth(user, password)
        elif token := token.strip():
            if not (token.isascii() and token.isprintable()):  # httpx's own message would have the token
                raise TrackerError(
                    "MLflow: MLFLOW_TRACKING_TOKEN has characters that are not printable ASCII: correct it"
                )
            headers["Authorization"] = f"Bearer {token}"
        elif self._user:
            auth = httpx.BasicAuth(self._user, self._password)
        with httpx.Client(
            base_url=self.uri, auth=auth, headers=headers, timeout=_SECONDS, verify=self._tls, follow_redirects=False
        ) as client:
            yield client

    def _find_or_create(self, server: _Server, run: Run) -> _Json:
        """Return the state of the run, which is created with its parameters unless a killed service has created it."""
        experiment = server.experiment(run.experiment)
        run_id = server.find_run(experiment, run.name)
        if run_id is None:
            parent = server.find_run(experiment, run.parent) if run.parent is not None else None
            body = {
                "experiment_id": experiment,
                "run_name": run.job_name,
                "start_time": _milliseconds(run.created_at),
                "tags": _pairs(_run_tags(run, parent)),
            }
            run_id = server.call("POST", "runs/create", body)["run"]["info"]["run_id"]
        server.log(run_id, "tags", _original_names(run.parameters))
        parameters = {_key(key): cut(text, _MAX_PARAM_VALUE) for key, text in run.parameters.items()}
        server.log(run_id, "params", _pairs(parameters))
        url = f"{self.uri}/#/experiments/{experiment}/runs/{run_id}"
        return {"run_id": run_id, "url": url, "notes": [], "left_out": 0}


class _Server:
    """The requests of one export."""

    def __init__(self, client: httpx.Client, uri: str) -> None:
        self._client, self._uri = client, uri

    def experiment(self, name: str) -> str:
        """Return the id of the experiment, which is created if there is none."""
        found = self._experiment_or_none(name)
        if found is None:
            try:
                return str(self.call("POST", "experiments/create", {"name": name})["experiment_id"])
            except _Refused as error:
                # another job has created it meanwhile
                if error.code != "RESOURCE_ALREADY_EXISTS" or (found := self._experiment_or_none(name)) is None:
                    raise
        if found.get("lifecycle_stage") == "deleted":
            raise TrackerError(
                f"MLflow: the experiment {name!r} was deleted: restore it (mlflow experiments restore --experiment-id "
                f"{found['experiment_id']})"
            )
        return str(found["experiment_id"])

    def _experiment_or_none(self, name: str) -> _Json | None:
        try:
            found: _Json = self.call("GET", "experiments/get-by-name", {"experiment_name": name})["experiment"]
        except _Refused as error:
            if error.code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return found

    def find_run(self, experiment: str, name: str) -> str | None:
        """Return the id of the run of this name that is not deleted; of several, the oldest."""
        body = {
            "experiment_ids": [experiment],
            "filter": f"tags.`ratchet.run` = '{name}'",
            "max_results": 1,
            "order_by": ["attributes.start_time ASC"],
        }
        runs = self.call("POST", "runs/search", body).get("runs") or [None]
        return runs[0] and str(runs[0]["info"]["run_id"])

    def log(self, run_id: str, kind: Literal["metrics", "params", "tags"], items: Sequence[_Json]) -> None:
        """Send one of the lists of ``log-batch``, in as many requests as the limits want."""
        for part in _parts(items, _MAX_METRICS if kind == "metrics" else _MAX_PARAMS):
            self.call("POST", "runs/log-batch", {"run_id": run_id, kind: part})

    def call(self, method: str, path: str, body: _Json) -> _Json:
        """Send a request and return its answer. Raise ``TrackerError``; ``_Refused`` if the answer is an error."""
        import httpx

        until = time.monotonic() + _SECONDS
        arguments: _Json = {"params": body} if method == "GET" else {"json": body}
        content = b""
        try:
            with self._client.stream(method, f"/api/2.0/mlflow/{path}", **arguments) as response:
                for part in response.iter_bytes():
                    content += part
                    if len(content) > _MAX_ANSWER or time.monotonic() > until:
                        raise httpx.ReadTimeout(f"the answer took more than {_SECONDS:g} s, or is too large")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TrackerError(
                f"MLflow at {self._uri}: {type(error).__name__}: {error}: check that the server runs and that the service can "
                "reach it"
            ) from None
        if response.is_redirect:
            to = cut(response.headers.get("location", ""), 200)
            raise TrackerError(f"MLflow at {self._uri}: redirects are not followed: use the address {to}")
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if response.is_success and isinstance(answer, dict):
            return answer
        raise _Refused(self._uri, response.status_code, answer, content, body.get("run_id"))


class _Refused(TrackerError):
    """An answer that is an error. ``code``: MLflow's error code, empty if the answer is not MLflow's."""

    def __init__(self, uri: str, status: int, answer: object, content: bytes, run_id: str | None) -> None:
        known = answer if isinstance(answer, dict) else {}
        self.code = str(known.get("error_code", ""))
        said = str(known.get("message") or content[:500].decode(errors="replace"))
        text = f"MLflow at {uri} answered {status} {self.code}: {cut(said, 500)}"
        # _check_run_is_active in sqlalchemy_store.py
        deleted = "Current state is deleted" in said or self.code == "RESOURCE_DOES_NOT_EXIST"
        cure = _CURES.get(status)
        if run_id is not None and deleted:
            cure = f"the run was deleted in MLflow: restore it (mlflow runs restore --run-id {run_id})"
        super().__init__(f"{text}: {cure}" if cure else text)


def _run_tags(run: Run, parent: str | None) -> dict[str, str]:
    """Return the tags of a new run. ``parent``: id of the parent's run."""
    tags = {_label_key(key): value for key, value in run.labels.items()}
    tags |= {"ratchet.run": run.name, "ratchet.job_id": run.job_id, "ratchet.owner": run.owner}
    tags |= {"mlflow.runName": run.job_name, "mlflow.user": run.owner}
    if run.parent is not None:
        tags["ratchet.parent"] = run.parent
    if parent is not None:
        tags["mlflow.parentRunId"] = parent
    if commit := run.parameters.get(GIT_COMMIT):
        tags["mlflow.source.git.commit"] = commit
    return {key: cut(value, _MAX_TAG_VALUE) for key, value in tags.items()}


def _label_key(key: str) -> str:
    """Return the key of a label's tag: the label's, unless MLflow or Ratchet gives that key a meaning."""
    return _key(f"label.{key}" if key.startswith(("mlflow.", "ratchet.")) else key)


def _send_end(server: _Server, run_id: str, end: End) -> None:
    """Send the summary, the place of the checkpoint, and then the status."""
    summary = [Point(f"ratchet/{name}", 0, value, end.at) for name, value in end.summary.items()]
    tags = _original_names({point.name for point in summary})
    if end.checkpoint is not None:
        tags += _pairs({"ratchet.checkpoint": cut(end.checkpoint, _MAX_TAG_VALUE)})
    server.log(run_id, "tags", tags)
    server.log(run_id, "metrics", [_metric(point) for point in summary])
    status = _STATUS[JobPhase(end.status)]
    server.call("POST", "runs/update", {"run_id": run_id, "status": status, "end_time": _milliseconds(end.at)})


def _metric(point: Point) -> _Json:
    """Return a point in the JSON of MLflow's API, which is that of protocol buffers: it has NaN and infinity as texts."""
    value: float | str = point.value
    if math.isnan(point.value):
        value = "NaN"
    elif math.isinf(point.value):
        value = "Infinity" if point.value > 0 else "-Infinity"
    return {"key": _key(point.name), "value": value, "timestamp": _milliseconds(point.at), "step": point.step}


def _key(name: str) -> str:
    """Return the key of a metric, parameter or tag: ``name`` if a server accepts it, otherwise a similar one that ends with a
    part of its SHA-256. Names that have such an end are changed too, so that two names never have one key."""
    norm = posixpath.normpath(name)
    is_path = norm == name and norm != "." and not norm.startswith(("..", "/"))  # path_not_unique in validation.py
    if _VALID_KEY.fullmatch(name) and is_path and len(name) <= _MAX_KEY and not _RENAMED.search(name):
        return name
    readable = re.sub(r"[^\w\- :]", "_", name)[: _MAX_KEY - 13]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _original_names(names: Iterable[str]) -> list[_Json]:
    """Return the tags that keep the names of changed keys."""
    return _pairs({f"ratchet.name.{_key(one)}": cut(one, _MAX_TAG_VALUE) for one in names if _key(one) != one})


def _milliseconds(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def _pairs(values: Mapping[str, str]) -> list[_Json]:
    return [{"key": key, "value": value} for key, value in values.items()]


def _parts(items: Sequence[_Json], count: int) -> Iterator[list[_Json]]:
    """Yield the items in parts of at most ``count``, each at most ``_MAX_BYTES`` long as JSON."""
    part: list[_Json] = []
    size = 0
    for item in items:
        length = len(json.dumps(item, ensure_ascii=False).encode()) + 1
        if part and (len(part) == count or size + length > _MAX_BYTES):
            yield part
            part, size = [], 0
        part.append(item)
        size += length
    if part:
        yield part
