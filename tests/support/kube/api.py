"""The store over HTTP, as the official clients speak it: verbs, lists, watches. No TLS, no authentication."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.support.kube import operations
from tests.support.kube.store import JOBS, PODS, RESOURCES, ApiError, Change, Object, Resource, Store, selector

_BOOKMARK_EVERY = 0.5  # seconds; a real server's is a minute


@dataclass(frozen=True)
class Request:
    """What was asked, for tests that count."""

    verb: str
    resource: str
    name: str | None
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Target:
    """What a path names."""

    resource: Resource
    namespace: str | None
    name: str | None
    sub: str | None


def target(path: str) -> Target:
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
    namespace = None
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    resource = RESOURCES.get((group, rest[0])) if rest else None
    if resource is None:
        raise ApiError(404, "NotFound", "the server could not find the requested resource")
    return Target(resource, namespace, *[*rest[1:], None, None][:2])


def no_right(verb: str, on: Target) -> str:
    """As RBAC says it."""
    kind = f"{on.resource.plural}.{on.resource.group}".rstrip(".")
    where = f'in API group "{on.resource.group}" in the namespace "{on.namespace}"'
    return f'{kind} is forbidden: User "u" cannot {verb} resource "{on.resource.plural}" {where}'


def _used_up(on: Target, name: str) -> str:
    kind = f"{on.resource.plural}.{on.resource.group}".rstrip(".")
    counts = f"requested: count/{kind}=1, used: count/{kind}=4, limited: count/{kind}=4"
    return f'{kind} "{name}" is forbidden: exceeded quota: objects, {counts}'


class KubeServer:
    """A server on a free loopback port. ``log`` answers for a pod's output (namespace, name, query); ``forbidden`` says why a
    request is refused, if it is."""

    def __init__(self, store: Store, log: Callable[[str, str, dict[str, str]], bytes] | None = None) -> None:
        self.store = store
        self.log = log or (lambda namespace, name, query: b"")
        self.forbidden: Callable[[str, Target], str | None] = lambda verb, target: None
        self.cut: Callable[[str, Target], bool] = lambda verb, target: (
            False
        )  # it is done, but half of the answer is lost
        self.full: set[str] = set()  # kinds of which a quota of objects has no room for one more
        self.requests: list[Request] = []
        self.down, self.knows_roles = threading.Event(), threading.Event()
        self.knows_roles.set()
        self.chunked = True  # False: as through a proxy that speaks HTTP/1.0, a watch's answer ends with its connection
        self.closing = threading.Event()
        self.watches: set[socket.socket] = set()
        outer = self

        class Handler(_Handler):
            server_ = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """A configuration by which every client finds this server."""
        cluster = {"name": "fake", "cluster": {"server": self.url}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": namespace}}
        user = {"name": "fake", "user": {"token": "none"}}
        content = {
            "apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": [user],
            "current-context": "fake",
        }  # fmt: skip
        path.write_text(yaml.safe_dump(content))
        return path

    def expire(self) -> None:
        """Every watch is told 410 Gone, and so is whoever comes with a version from before."""
        self.store.compact()

    def cut_watches(self) -> None:
        """Break the connections that watches are served on."""
        for connection in list(self.watches):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        """The server drops every connection without an answer."""
        self.down.set()
        self.cut_watches()
        try:
            yield
        finally:
            self.down.clear()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """The server has been restarted: watches are cut, and as a real one it refuses everybody until it knows the roles."""
        self.knows_roles.clear()
        self.cut_watches()
        try:
            yield
        finally:
            self.knows_roles.set()

    def count(self, verb: str | None = None, resource: str | None = None) -> int:
        return sum(verb in (None, r.verb) and resource in (None, r.resource) for r in list(self.requests))

    def close(self) -> None:
        self.closing.set()
        self.cut_watches()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_: KubeServer
    chunked = True
    cut = False

    def log_message(self, *args: object) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server_.down.is_set():
            self.close_connection = True
            return
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        try:
            given = json.loads(body) if body else None
            if parts.path == "/version":
                self._answer(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.0"})
            else:
                self._dispatch(target(parts.path), query, given)
        except ApiError as error:
            self._answer(error.code, error.body)
        except (KeyError, TypeError, AttributeError) as error:
            self._answer(400, ApiError(400, "BadRequest", f"cannot be decoded: {error!r}").body)

    do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = _handle

    def _dispatch(self, on: Target, query: dict[str, str], body: Any) -> None:
        store, watch = self.server_.store, query.get("watch") in ("true", "1", "True")
        verbs = {
            "POST": "create",
            "PATCH": "patch",
            "PUT": "update",
            "DELETE": "delete",
            "GET": "get" if on.name else "list",
        }
        verb = "watch" if watch else verbs[self.command]
        verb = "deletecollection" if verb == "delete" and on.name is None else verb
        named = f"{on.resource.plural}/{on.sub}" if on.sub else on.resource.plural
        self.server_.requests.append(Request(verb, named, on.name))
        self.cut = self.server_.cut(verb, on)
        refused = self.server_.forbidden(verb, on) if self.server_.knows_roles.is_set() else no_right(verb, on)
        if refused is not None:
            raise ApiError(403, "Forbidden", refused)
        if watch:
            self._watch(on, query)
        elif self.command == "GET":
            self._read(on, query)
        else:
            self._write(store, on, query, body or {})

    def _read(self, on: Target, query: dict[str, str]) -> None:
        store = self.server_.store
        if on.name is None:
            with store.changed:
                items = [o for o in store.select(on.resource, on.namespace) if _chosen(o, query)]
                version = str(store.version)
            kind, metadata = f"{on.resource.kind}List", {"resourceVersion": version}
            self._answer(
                200, {"kind": kind, "apiVersion": on.resource.api_version, "metadata": metadata, "items": items}
            )
        elif on.sub == "log":
            text = self.server_.log(on.namespace or "", on.name, query)
            self._answer(200, text, "text/plain")
        else:
            self._answer(200, store.get(on.resource, on.namespace or "", on.name))

    def _write(self, store: Store, on: Target, query: dict[str, str], body: Any) -> None:
        namespace, name = on.namespace or "default", on.name or ""
        if self.command == "POST" and on.sub == "eviction":
            self._answer(201, operations.evict(store, namespace, name, body))
        elif self.command == "POST" and on.name is None:
            if on.resource.plural in self.server_.full:
                raise ApiError(403, "Forbidden", _used_up(on, body["metadata"]["name"]))
            dry = query.get("dryRun") == "All"
            self._answer(201, operations.create(store, on.resource, namespace, body, dry))
        elif self.command == "PATCH":
            made = operations.patch(store, on.resource, namespace, name, body, status=on.sub == "status")
            self._answer(200, made)
        elif self.command == "DELETE":
            options = {k: query[k] for k in ("propagationPolicy",) if k in query} | body
            if "gracePeriodSeconds" in query:
                options["gracePeriodSeconds"] = int(query["gracePeriodSeconds"])
            if on.name is not None:
                self._answer(200, operations.delete(store, on.resource, namespace, name, options))
                return
            for found in store.select(on.resource, namespace):
                if _chosen(found, query):
                    operations.delete(store, on.resource, namespace, found["metadata"]["name"], options)
            self._answer(200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})
        else:
            raise ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _watch(self, on: Target, query: dict[str, str]) -> None:
        store = self.server_.store
        given = query.get("resourceVersion", "")
        until = time.monotonic() + float(query.get("timeoutSeconds", 1800))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.chunked = self.server_.chunked
        self.send_header(*(("Transfer-Encoding", "chunked") if self.chunked else ("Connection", "close")))
        self.end_headers()
        self.server_.watches.add(self.connection)
        try:
            with store.changed:
                version = int(given) if given not in ("", "0") else store.version
                if given in ("", "0"):
                    for found in store.select(on.resource, on.namespace):
                        if _chosen(found, query):
                            self._event("ADDED", found)
            self._follow(on, query, version, until)
            self._chunk(b"")
        except (OSError, ValueError):
            self.close_connection = True
        finally:
            self.server_.watches.discard(self.connection)

    def _follow(self, on: Target, query: dict[str, str], version: int, until: float) -> None:
        store, bookmark = self.server_.store, time.monotonic() + _BOOKMARK_EVERY
        while time.monotonic() < until and not self.server_.closing.is_set():
            with store.changed:  # the compaction and the changes are read together: neither can change in between
                expired, changes = version < store.compacted, store.since(version)
            if expired:
                message = f"too old resource version: {version} ({store.compacted})"
                self._event("ERROR", ApiError(410, "Expired", message).body)
                return
            for change in changes:
                version = change.version
                type_ = _watch_event_type(change, on, query)
                if type_ is not None:
                    self._event(type_, change.object)
            if query.get("allowWatchBookmarks") in ("true", "True") and time.monotonic() > bookmark:
                bookmark = time.monotonic() + _BOOKMARK_EVERY
                version = max(version, store.version) if not store.since(version) else version
                kind = {"kind": on.resource.kind, "apiVersion": on.resource.api_version}
                self._event("BOOKMARK", kind | {"metadata": {"resourceVersion": str(version)}})
            store.wait(version, min(max(until - time.monotonic(), 0.0), 0.2))

    def _event(self, type_: str, made: Object) -> None:
        self._chunk(json.dumps({"type": type_, "object": made}).encode() + b"\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n" if self.chunked else data)
        self.wfile.flush()

    def _answer(self, code: int, body: Object | bytes, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if self.cut else data)
        self.close_connection |= self.cut


def _chosen(made: Object, query: dict[str, str]) -> bool:
    if "labelSelector" in query and not selector(query["labelSelector"])(made["metadata"].get("labels") or {}):
        return False
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = part.replace("==", "=").partition("=")
        at: Any = made
        for step in key.split("."):
            at = (at or {}).get(step)
        if key.endswith("!"):
            raise ApiError(400, "BadRequest", f"no such selector here: {part}")
        if str(at) != value:
            return False
    return True


def _watch_event_type(change: Change, on: Target, query: dict[str, str]) -> str | None:
    """The type under which this watch sees the change; None: not at all."""
    made = change.object
    if change.resource != on.resource or on.namespace not in (None, made["metadata"]["namespace"]):
        return None
    if on.name is not None and made["metadata"]["name"] != on.name:
        return None
    if _chosen(made, query):
        return change.type
    known = {**made, "metadata": {**made["metadata"], "labels": change.before}}
    return "DELETED" if change.type == "MODIFIED" and _chosen(known, query) else None


__all__ = ["JOBS", "PODS", "KubeServer", "Request", "Target"]
