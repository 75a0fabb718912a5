"""Where the service is and which token it gets: an address given, a variable, the configuration file, ``service.json`` of the run
directory, or that of the one service of this user that runs."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from ratchet_client.config_file import ConfigFile, config_path, normalised, read_config
from ratchet_client.errors import ServiceUnreachable
from ratchet_contract import environment, service_pointers
from ratchet_contract.errors import Refused
from ratchet_contract.messages import ServiceFile
from ratchet_contract.paths import HomePaths
from ratchet_contract.version import PROTOCOL_VERSION, RATCHET_VERSION

DEFAULT_HOME = ".ratchet"
NEVER_STARTED = "service-not-started"
SEVERAL = "several-services"
RUNNING = "the service that runs"


def start_it(home: Path) -> str:
    """What to do where the service of a run directory does not run."""
    if home == Path.cwd() / DEFAULT_HOME:
        return "start it with `ratchet serve`"
    return f"start it with `ratchet serve --home {shlex.quote(str(home))}`"


@dataclass(frozen=True)
class Setting:
    """A value and who gave it: an option, a variable, the path of the configuration file, ``RUNNING``, or ``default``."""

    value: str
    source: str


@dataclass(frozen=True)
class Target:
    """What a client talks to. ``server`` None: whatever ``service.json`` in ``home`` names when asked.

    ``token_server`` None: the token was given for this target, so it goes to its named server, or to this machine. ``several``:
    run directories of services, none of them named.
    """

    server: Setting | None
    home: Setting
    token: Setting | None = None
    token_server: str | None = None
    several: tuple[Path, ...] = ()

    def url(self) -> str:
        """Base URL, ``service.json`` read afresh at every call: a restart may change it. Raises ``ServiceUnreachable``, and
        ``Refused`` where one of several services would have to be taken."""
        if self.server is not None:
            return self.server.value
        if self.several:
            choices = "".join(f"\n  --home {home}" for home in self.several)
            raise Refused(f"several services run, none of them in {Path.cwd()}: name one{choices}", code=SEVERAL)
        file = HomePaths(Path(self.home.value)).service_file
        try:
            found = ServiceFile.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            raise ServiceUnreachable(
                f"no service is running for the run directory {file.parent}: {self._begin_it(file.parent)}, "
                f"or name a server with --server or {environment.SERVER}{self._others()}{_own_runs(file.parent)}",
                code=NEVER_STARTED,
            ) from None
        except OSError as error:
            raise ServiceUnreachable(
                f"{file} cannot be read ({error.strerror or error}): is the run directory another user's? Name a server with "
                f"--server, or your own run directory with --home"
            ) from None
        except ValidationError:
            raise ServiceUnreachable(
                f"{file} is damaged, or of another version of Ratchet: {start_it(file.parent)}, which writes it anew"
            ) from None
        if found.protocol != PROTOCOL_VERSION:
            raise other_protocol(f"the service of {file.parent}", found.protocol)
        return found.url.rstrip("/")

    def start_it(self) -> str:
        """What to do when nothing answers at an address that ``service.json`` told: the service ended without taking it away."""
        if self.server is not None:
            return f"start it with `ratchet serve` on its machine, or check the address ({self.server.source})"
        home = Path(self.home.value)
        with suppress(OSError, ValidationError):
            pid = ServiceFile.model_validate_json(HomePaths(home).service_file.read_bytes()).pid
            if not Path(f"/proc/{pid}").exists():
                return f"the service of {home} (pid {pid}) has ended: {start_it(home)}{self._others()}"
        return start_it(home)

    def _begin_it(self, home: Path) -> str:
        """What to do where ``home`` has no service; one that was killed elsewhere may be the one that is meant."""
        killed = service_pointers.killed() if self.home.source == "default" and not home.exists() else []
        if not killed:
            return start_it(home)
        again = " or ".join(f"`ratchet serve --home {shlex.quote(str(other))}`" for other in killed)
        return f"a service of yours was killed, {again} starts it again with its jobs (`ratchet serve` a new one here)"

    def _others(self) -> str:
        """The services of this user that run, where nobody named a run directory."""
        others = service_pointers.running() if self.home.source == "default" else []
        return "".join(f", or use the one that runs: --home {other}" for other in others)

    def token_for(self, url: str) -> str | None:
        """The token to send to ``url``: a token never reaches a server that it was not meant for, so one that only a file of
        the current directory names gets none unless it is this machine."""
        if self.token is None:
            return None
        if self.token_server is not None:
            return self.token.value if normalised(url) == self.token_server else None
        return self.token.value if self.server is not None or is_loopback(url) else None


def _own_runs(home: Path) -> str:
    """Where the jobs of ``ratchet run`` are, which has a run directory of its own for each command."""
    runs = HomePaths(home).runs
    with suppress(OSError, ValueError):  # there is none, or one is removed meanwhile
        newest = max(runs.iterdir(), key=lambda path: path.stat().st_mtime)
        name = shlex.quote(str(newest))
        serve = "" if HomePaths(newest).service_file.exists() else f"`ratchet serve --home {name}` and, beside it, "
        newest_jobs = f"{serve}`ratchet --home {name} list`"
        return f". `ratchet run` keeps its jobs below {runs}; to see those of the newest command: {newest_jobs}"
    return ""


def other_protocol(who: str, protocol: int | str) -> Refused:
    """The refusal of a service that speaks another protocol than this client."""
    return Refused(
        f"{who} speaks protocol {protocol}, this `ratchet` {RATCHET_VERSION} speaks {PROTOCOL_VERSION}: use the `ratchet` of the "
        "service's environment, or install the same version of ratchet-train on both sides",
        code="protocol-mismatch",
    )


def find_target(
    server: str | None = None, home: str | os.PathLike[str] | None = None, token: str | None = None
) -> Target:
    """Option (the arguments) before variable before file before the run directory ``./.ratchet``, if it is there, before the one
    service of this user that runs. Raises ``Refused``."""
    environ = os.environ
    path = config_path()
    variable = environ.get(environment.SERVER)
    named: Setting | None = None
    if server:
        named = Setting(normalised(server), "--server")
    elif home is None and variable:
        named = Setting(normalised(variable), environment.SERVER)
    given = token or environ.get(environment.TOKEN)
    config = read_config(path)
    if named is None and home is None and not environ.get(environment.HOME) and config.server is not None:
        named = Setting(normalised(config.server), str(path))
    directory = _home(home)
    several: tuple[Path, ...] = ()
    if named is None and directory.source == "default":
        directory, several = _running(directory)
    if given:
        token_given = Setting(checked_token(given), "token" if token else environment.TOKEN)
        return Target(named, directory, token_given, several=several)
    return Target(named, directory, *_stored(config, path), several=several)


def _running(default: Setting) -> tuple[Setting, tuple[Path, ...]]:
    """The run directory of the service that runs where ``default`` is not there; or all of them, if they are several.

    A run directory whose service has ended stays the one that is meant: its jobs are there, and another service may have
    others under the same names. One that holds nothing but those of ``ratchet run`` is none.
    """
    if _is_run_directory(HomePaths(Path(default.value))):
        return default, ()
    found = service_pointers.running()
    if len(found) == 1:
        return Setting(str(found[0]), RUNNING), ()
    return default, tuple(found)


def _is_run_directory(paths: HomePaths) -> bool:
    try:
        return list(paths.home.iterdir()) != [paths.runs]
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


def _stored(config: ConfigFile, path: Path) -> tuple[Setting | None, str | None]:
    if config.token is None or config.token_server is None:
        return None, None
    return Setting(checked_token(config.token), str(path)), normalised(config.token_server)


def checked_token(text: str) -> str:
    """Raises ``Refused`` for what cannot stand in a header; the text itself is never shown."""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise Refused("a token is printable ASCII without spaces: check how it was copied", code="invalid-config")
    return text


def _home(home: str | os.PathLike[str] | None) -> Setting:
    if home:
        return Setting(str(home_directory(home)), "--home")
    return Setting(str(home_directory()), environment.HOME if os.environ.get(environment.HOME) else "default")


def home_directory(home: str | os.PathLike[str] | None = None) -> Path:
    """The run directory: the argument, else ``RATCHET_HOME``, else ``./.ratchet``; absolute."""
    return Path(home or os.environ.get(environment.HOME) or DEFAULT_HOME).expanduser().absolute()


def is_loopback(url: str) -> bool:
    """Whether the address is this machine's own."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or (host.startswith("127.") and host.replace(".", "").isdigit())
