"""Finds the service's address and its token, from options, variables, the configuration file, and the ``service.json`` of running
services."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from ratchet_client.http.config_file import ConfigFile, config_path, normalise_url, read_config
from ratchet_client.http.errors import ServiceUnreachable
from ratchet_contract import env_vars
from ratchet_contract.errors import Refused
from ratchet_contract.paths import HomePaths
from ratchet_contract.processes import service_pointers
from ratchet_contract.protocol.messages import ServiceFile
from ratchet_contract.version import PROTOCOL_VERSION, RATCHET_VERSION

DEFAULT_HOME = ".ratchet"
NEVER_STARTED = "service-not-started"
SEVERAL = "several-services"
RUNNING = "the running service"


def start_hint(home: Path) -> str:
    """Return a hint with the command that starts the service of the run directory ``home``."""
    if home == Path.cwd() / DEFAULT_HOME:
        return "start it with `ratchet serve`"
    return f"start it with `ratchet serve --home {shlex.quote(str(home))}`"


@dataclass(frozen=True)
class Setting:
    """A value and its source, such as the name of an option or variable, or the path of the configuration file."""

    value: str
    source: str


@dataclass(frozen=True)
class Target:
    """The service that a client uses. ``server``: its address; None: the address is in ``service.json`` of the run directory
    ``home``. ``token_server``: if set, the only address that ``token`` is sent to. ``several``: the run directories of several
    running services, of which the user must choose one."""

    server: Setting | None
    home: Setting
    token: Setting | None = None
    token_server: str | None = None
    several: tuple[Path, ...] = ()

    def url(self) -> str:
        """Return the base URL of the service; without a ``server`` it is read from ``service.json``. Raise ``ServiceUnreachable``
        if that file is missing or unusable, ``Refused`` for another protocol or several services."""
        if self.server is not None:
            return self.server.value
        if self.several:
            choices = "".join(f"\n  --home {home}" for home in self.several)
            raise Refused(f"several services run, none of them in {Path.cwd()}: name one{choices}", code=SEVERAL)
        # Read at every call, since a restart may change the address.
        file = HomePaths(Path(self.home.value)).service_file
        try:
            found = ServiceFile.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            raise ServiceUnreachable(
                f"no service is running for the run directory {file.parent}: {self._start_hint_for(file.parent)}, "
                f"or name a server with --server or {env_vars.SERVER}{self._other_services_hint()}{_own_runs_hint(file.parent)}",
                code=NEVER_STARTED,
            ) from None
        except OSError as error:
            raise ServiceUnreachable(
                f"{file} cannot be read ({error.strerror or error}): is the run directory another user's? Name a server with "
                f"--server, or your own run directory with --home"
            ) from None
        except ValidationError:
            raise ServiceUnreachable(
                f"{file} is damaged, or of another version of Ratchet: {start_hint(file.parent)}, which rewrites it"
            ) from None
        if found.protocol != PROTOCOL_VERSION:
            raise protocol_mismatch(f"the service of {file.parent}", found.protocol)
        return found.url.rstrip("/")

    def start_hint(self) -> str:
        """Return, as text, what to do if the service does not respond."""
        if self.server is not None:
            return f"start it with `ratchet serve` on its machine, or check the address ({self.server.source})"
        home = Path(self.home.value)
        with suppress(OSError, ValidationError):
            pid = ServiceFile.model_validate_json(HomePaths(home).service_file.read_bytes()).pid
            if not Path(f"/proc/{pid}").exists():
                return f"the service of {home} (pid {pid}) has ended: {start_hint(home)}{self._other_services_hint()}"
        return start_hint(home)

    def _start_hint_for(self, home: Path) -> str:
        """Return, as text, how to start a service for the run directory ``home``. If services of the user were killed, the text
        may say how to start these again."""
        killed = service_pointers.killed_services() if self.home.source == "default" and not home.exists() else []
        if not killed:
            return start_hint(home)
        again = " or ".join(f"`ratchet serve --home {shlex.quote(str(other))}`" for other in killed)
        return f"a service of yours was killed, {again} starts it again with its jobs (`ratchet serve` a new one here)"

    def _other_services_hint(self) -> str:
        """Return text that lists this user's running services; "" if there are none, or if ``home`` is not the default."""
        others = service_pointers.running_services() if self.home.source == "default" else []
        return "".join(f", or use the one that runs: --home {other}" for other in others)

    def token_for(self, url: str) -> str | None:
        """Return the token to send to ``url``, the base address of this target's server. Return None if there is no token. A
        token with a ``token_server`` is returned only if ``url`` is this address. Another token is not returned if the address
        comes from the run directory and is not a loopback address."""
        if self.token is None:
            return None
        if self.token_server is not None:
            return self.token.value if normalise_url(url) == self.token_server else None
        return self.token.value if self.server is not None or is_loopback(url) else None


def _own_runs_hint(home: Path) -> str:
    """Return text on where ``ratchet run`` keeps its jobs and how to list the newest ones; "" if none is found below ``home``."""
    runs = HomePaths(home).runs
    with suppress(OSError, ValueError):  # no such directory, or one is removed meanwhile
        newest = max(runs.iterdir(), key=lambda path: path.stat().st_mtime)
        name = shlex.quote(str(newest))
        serve = (
            ""
            if HomePaths(newest).service_file.exists()
            else f"`ratchet serve --home {name}` and, in another terminal, "
        )
        newest_jobs = f"{serve}`ratchet --home {name} list`"
        return f". `ratchet run` keeps its jobs below {runs}; to see those of the newest command: {newest_jobs}"
    return ""


def protocol_mismatch(who: str, protocol: int | str) -> Refused:
    """Return the error for a service that uses another protocol than this client. ``who``: the service, as the message names
    it."""
    return Refused(
        f"{who} speaks protocol {protocol}, this `ratchet` {RATCHET_VERSION} speaks {PROTOCOL_VERSION}: use the `ratchet` of the "
        "service's environment, or install the same version of ratchet-train on both sides",
        code="protocol-mismatch",
    )


def find_target(
    server: str | None = None, home: str | os.PathLike[str] | None = None, token: str | None = None
) -> Target:
    """Return the service to use and its token, from these options, variables, the configuration file, and running services. Raise
    ``Refused`` if the file, or an address or token to be used, is invalid. No request is sent.

    An option comes before a variable, a variable before the configuration file, the file before ``./.ratchet``, and that before
    this user's only running service.
    """
    environ = os.environ
    path = config_path()
    variable = environ.get(env_vars.SERVER)
    named: Setting | None = None
    if server:
        named = Setting(normalise_url(server), "--server")
    elif home is None and variable:
        named = Setting(normalise_url(variable), env_vars.SERVER)
    given = token or environ.get(env_vars.TOKEN)
    config = read_config(path)
    if named is None and home is None and not environ.get(env_vars.HOME) and config.server is not None:
        named = Setting(normalise_url(config.server), str(path))
    directory = _home(home)
    several: tuple[Path, ...] = ()
    if named is None and directory.source == "default":
        directory, several = _running(directory)
    if given:
        token_given = Setting(validate_token(given), "token" if token else env_vars.TOKEN)
        return Target(named, directory, token_given, several=several)
    return Target(named, directory, *_stored(config, path), several=several)


def _running(default: Setting) -> tuple[Setting, tuple[Path, ...]]:
    """Return the run directory to use, ``default`` or that of this user's only running service, and the value of
    ``Target.several``."""
    # Also if its service has ended: its jobs are there, and another service may have others with the same names.
    if _is_run_directory(HomePaths(Path(default.value))):
        return default, ()
    found = service_pointers.running_services()
    if len(found) == 1:
        return Setting(str(found[0]), RUNNING), ()
    return default, tuple(found)


def _is_run_directory(paths: HomePaths) -> bool:
    """Return True if the directory exists, unless it contains only the run directories of ``ratchet run``."""
    try:
        return list(paths.home.iterdir()) != [paths.runs]
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


def _stored(config: ConfigFile, path: Path) -> tuple[Setting | None, str | None]:
    """Return the token of the configuration file ``path`` and its server's address; None and None if it has no token. Raise
    ``Refused`` if one is invalid."""
    if config.token is None or config.token_server is None:
        return None, None
    return Setting(validate_token(config.token), str(path)), normalise_url(config.token_server)


def validate_token(text: str) -> str:
    """Return the token ``text`` unchanged. Raise ``Refused``, without the token in the message, if it has a space or a
    character that is not printable ASCII."""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise Refused("a token is printable ASCII without spaces: check how it was copied", code="invalid-config")
    return text


def _home(home: str | os.PathLike[str] | None) -> Setting:
    """Return the absolute run directory with its source: the option ``home``, else the variable ``RATCHET_HOME``, else the
    default."""
    if home:
        return Setting(str(home_directory(home)), "--home")
    return Setting(str(home_directory()), env_vars.HOME if os.environ.get(env_vars.HOME) else "default")


def home_directory(home: str | os.PathLike[str] | None = None) -> Path:
    """Return the absolute run directory, which need not exist: the argument, else ``RATCHET_HOME``, else ``./.ratchet``."""
    return Path(home or os.environ.get(env_vars.HOME) or DEFAULT_HOME).expanduser().absolute()


def is_loopback(url: str) -> bool:
    """Return True if the host of ``url`` is ``localhost``, ``::1`` or an IPv4 address that begins with ``127.``."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or (host.startswith("127.") and host.replace(".", "").isdigit())
