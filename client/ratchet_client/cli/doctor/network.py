"""Checks loopback, proxies and the service: whether one runs, whether its version is that of this installation, whether the
clocks agree, and whether it parks agents."""

from __future__ import annotations

import os
import socket
import urllib.request
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from ratchet_client.cli.shared.options import Settings
from ratchet_client.http.discovery import SEVERAL, find_target, home_directory, is_loopback, start_hint
from ratchet_client.http.errors import ServiceUnreachable
from ratchet_contract import env_vars
from ratchet_contract.api.fleet import ParkedObstacle, ParkedView
from ratchet_contract.doctor.findings import Finding, failed, not_checked, ok, warning
from ratchet_contract.errors import RatchetError
from ratchet_contract.paths import HomePaths
from ratchet_contract.protocol.messages import ServiceFile
from ratchet_contract.version import PROTOCOL_HEADER, PROTOCOL_VERSION, RATCHET_VERSION

if TYPE_CHECKING:
    import httpx

SECONDS: Final = 5.0
MAX_SKEW: Final = 5.0
"""Seconds between two clocks above which times of service and client cannot be compared (the header has whole seconds)."""
_EXACT: Final = 2.0
_SAME: Final = "restart the service from this installation (`ratchet serve`), or use the `ratchet` of the service's"
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")


def loopback() -> Finding:
    """Return the finding on loopback: connect to a free port of 127.0.0.1 and send a few bytes both ways."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(SECONDS)
            with socket.create_connection(server.getsockname(), timeout=SECONDS) as one:
                two, _ = server.accept()
                with two:
                    two.settimeout(SECONDS)
                    one.sendall(b"ping")
                    two.sendall(two.recv(4))
                    answer = one.recv(4)
            port = server.getsockname()[1]
    except OSError as error:
        return failed(
            "loopback",
            "does not work",
            detail=f"127.0.0.1: {error}",
            cure="ip link set lo up, and let no firewall rule drop traffic on lo",
        )
    if answer != b"ping":
        return failed(
            "loopback",
            "does not work",
            detail="bytes sent to 127.0.0.1 came back changed",
            cure="let no firewall rule redirect traffic on lo",
        )
    return ok("loopback", "works", f"127.0.0.1, free port {port}")


def proxies() -> list[Finding]:
    """Return a list with one finding if a proxy is set that programs would use for this machine; else an empty list."""
    names = [name for name in _PROXIES if os.environ.get(name) or os.environ.get(name.upper())]
    if not names or urllib.request.proxy_bypass("127.0.0.1"):
        return []
    return [
        ok(
            "proxy",
            ", ".join(names),
            "does not apply to Ratchet's own requests on this machine; for curl and browsers "
            "set no_proxy=127.0.0.1,localhost",
        )
    ]


def service(settings: Settings) -> list[Finding]:
    """Return findings on the service. A running service must respond, be ready and use this Ratchet's protocol. It is ok if no
    service runs, unless an address is set. May block for some seconds."""
    home = HomePaths(home_directory(settings.home))
    try:
        target = find_target(settings.server, settings.home)
        url = target.url()
    except ServiceUnreachable:
        return (
            [_unreadable(home)] if home.service_file.exists() else [ok("service", "not running", start_hint(home.home))]
        )
    except RatchetError as error:
        if error.code == "protocol-mismatch":
            return [failed("service version", "another protocol", detail=error.detail, cure=_SAME)]
        if error.code == SEVERAL:
            return [not_checked("service", "several run", detail=error.detail, cure="name one with --home")]
        return [
            failed(
                "service",
                "wrong address",
                detail=error.detail,
                cure=f"correct --server, {env_vars.SERVER} or the configuration file",
            )
        ]
    described = None if target.server else _described(HomePaths(Path(target.home.value)).service_file)
    import httpx

    try:
        with httpx.Client(timeout=SECONDS, trust_env=not is_loopback(url)) as client:
            health, ready = client.get(url + "/healthz"), client.get(url + "/readyz")
            now = datetime.now(UTC)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return [_unresponsive(url, home, described, error)]
    version = _stated_version(health)
    if health.status_code != 200 or version is None:
        return [
            failed(
                "service",
                "not Ratchet's",
                detail=f"{url}/healthz answers {health.status_code}",
                cure=f"check the address, or {start_hint(home.home)}",
            )
        ]
    found = [_check_ready(url, ready, is_loopback(url))]
    found.append(_version(health.headers.get(PROTOCOL_HEADER), version))
    found.append(_check_clock_skew(health.headers.get("date"), now))
    return [*found, _parked_agents(url, target.token_for(url))] if ready.status_code == 200 else found


def _described(path: Path) -> ServiceFile | None:
    """Return the content of the ``service.json`` at ``path``; None if it cannot be read or is invalid."""
    try:
        return ServiceFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _unreadable(home: HomePaths) -> Finding:
    return failed(
        "service", "unknown", detail=f"{home.service_file} cannot be read", cure=f"{start_hint(home.home)} again"
    )


def _unresponsive(url: str, home: HomePaths, described: ServiceFile | None, error: Exception) -> Finding:
    """Return the finding for a service that does not respond: ok if the process in ``described``, its ``service.json``, does
    not exist, else failed."""
    if described is not None and not Path(f"/proc/{described.pid}").exists():
        return ok(
            "service", "not running", f"the one at {url} (pid {described.pid}) was killed; {start_hint(home.home)}"
        )
    return failed(
        "service",
        "no answer",
        detail=f"{url}: {error or type(error).__name__}",
        cure=f"{start_hint(home.home)}, or check --server / {env_vars.SERVER} and the network",
    )


def _stated_version(answer: httpx.Response) -> str | None:
    """Return the version in a response of ``/healthz``; None if there is none."""
    try:
        return str(answer.json()["version"])
    except (ValueError, KeyError, TypeError):
        return None


def _problem(answer: httpx.Response) -> tuple[str, str]:
    """Return code and detail of the problem document in a response; if it has none, its status and a substitute text."""
    try:
        body = answer.json()
        return str(body["code"]), str(body["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}", "without a reason"


def _check_ready(url: str, ready: httpx.Response, here: bool) -> Finding:
    """Return the finding on a service that responds: whether it is ready and reached safely. ``here``: it is on this machine."""
    unencrypted = url.startswith("http://") and not here
    where = f"{url}, {'this machine' if here else 'another machine: its disks and GPUs were not checked'}"
    if ready.status_code != 200:
        code, detail = _problem(ready)
        return failed(
            "service",
            "not ready",
            detail=f"{where}; {code}: {detail}",
            cure="docs/troubleshooting.md, under The service does not answer, explains this code; see also the service's log",
        )
    if unencrypted:
        return warning(
            "service",
            "running",
            detail=f"{where}; over plain HTTP: anyone who can read the traffic obtains the token",
            cure="start it with --tls-cert and --tls-key, or behind a proxy that terminates TLS, and use https://",
        )
    return ok("service", "running", where)


def _version(protocol: str | None, version: str) -> Finding:
    """Return the finding on the service's version. ``protocol``: from the response's header, None if it is absent."""
    name = "service version"
    if protocol is not None and protocol != str(PROTOCOL_VERSION):
        detail = f"protocol {protocol}, this installation speaks {PROTOCOL_VERSION}: its agents will be refused"
        return failed(name, version, detail=detail, cure=_SAME)
    if version != RATCHET_VERSION or protocol is None:
        return warning(name, version, detail=f"this client is {RATCHET_VERSION}", cure=_SAME)
    return ok(name, version, f"protocol {protocol}")


def _check_clock_skew(header: str | None, now: datetime) -> Finding:
    """Return the finding on the difference between the service's clock and ``now``. ``header``: the response's Date header."""
    name = "service clock"
    try:
        there = parsedate_to_datetime(header or "")
    except (ValueError, OverflowError):
        return not_checked(
            name, "unknown", detail="the service sends no valid Date header", cure="compare `date -u` on both machines"
        )
    # A date with the zone -0000, or without one, is UTC, and has no tzinfo.
    seconds = ((there if there.tzinfo else there.replace(tzinfo=UTC)) - now).total_seconds()
    if abs(seconds) > MAX_SKEW:
        return warning(
            name,
            f"{seconds:+.0f} s",
            detail="against this machine: ages and `logs --since` will be off by as much",
            cure="timedatectl set-ntp true, on both machines (of a container: on its host)",
        )
    # The header's time may be a second old when it is written, and is truncated to whole seconds.
    return ok(name, "agrees" if abs(seconds) <= _EXACT else f"{seconds:+.0f} s", "against this machine")


_PARKED: Final = "parked agents"
_OBSTACLES: Final[dict[ParkedObstacle, tuple[str, str]]] = {
    "memory-short": (
        "when one was to be parked, less than twice the memory that one may use was available to the service",
        "free memory there (it is looked at again after a minute), or lower `memory` of --standby (an agent with torch alone "
        "takes some 300 MB)",
    ),
    "too-large": (
        "one used more memory than it may",
        "raise `memory` of --standby (an agent with torch alone takes some 300 MB; the service's log has the size)",
    ),
    "ended": ("one ended during its imports", "see in the service's log what it printed"),
    "not-started": ("the system refused its process", "see the error in the service's log"),
    "relative-pythonpath": (
        "the service was started with a relative directory in PYTHONPATH, where each job would find another one",
        "start the service without it, or with absolute directories",
    ),
}


def _parked_agents(url: str, token: str | None) -> Finding:
    """Ask the service at ``url`` for its parked agents, and return the finding on them. May block for some seconds."""
    import httpx

    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = httpx.get(f"{url}/v1/fleet?days=1", headers=headers, timeout=SECONDS, trust_env=not is_loopback(url))
    except httpx.HTTPError as error:
        detail = f"GET /v1/fleet: {error or type(error).__name__}"
        return not_checked(_PARKED, "unknown", detail=detail, cure="try again, and see the service's log")
    if answer.status_code != 200:
        code, detail = _problem(answer)
        cure = f"give a token: `ratchet config set token`, or {env_vars.TOKEN}"
        if answer.status_code not in (401, 403):
            cure = "see the service's log"
        return not_checked(_PARKED, "unknown", detail=f"GET /v1/fleet: {code}: {detail}", cure=cure)
    try:
        given = answer.json()["parked"]
        parked = None if given is None else ParkedView.model_validate(given)
    except (ValueError, KeyError, TypeError):
        return not_checked(_PARKED, "unknown", detail="GET /v1/fleet answers as another version does", cure=_SAME)
    return _check_parked(parked)


def _check_parked(parked: ParkedView | None) -> Finding:
    """Return the finding on the parked agents: a warning if something prevents them. None: the service parks none itself."""
    if parked is None:
        return ok(_PARKED, "none", "this process of the service starts no agents on its machine")
    if parked.max_agents == 0:
        return ok(_PARKED, "off", "each start makes all imports; with `--standby on`, later starts are faster")
    bounds = (
        f"at most {parked.max_agents} of {parked.max_memory_bytes / 2**20:.0f} MiB, each for {parked.max_seconds:g} s after "
        "the last attempt of its kind"
    )
    count = parked.ready + parked.starting
    value = f"on, {count} parked, {parked.memory_bytes / 2**20:.0f} MiB" if count else "on, none parked"
    if not parked.obstacles:
        return ok(_PARKED, value, bounds)
    whys, cures = zip(*(_OBSTACLES[one] for one in parked.obstacles), strict=True)
    return warning(
        _PARKED,
        value,
        detail=f"starts of some jobs are cold: {'; '.join(whys)}; {bounds}",
        cure="; ".join([*cures, "or switch them off: --standby off (--standby is an option of `ratchet serve`)"]),
    )
