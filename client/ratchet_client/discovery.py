"""Where the service is: an address given, ``RATCHET_SERVER``, or ``service.json`` in the run directory."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from ratchet_client.errors import ServiceUnreachable
from ratchet_contract import environment
from ratchet_contract.errors import Refused
from ratchet_contract.messages import ServiceFile
from ratchet_contract.paths import HomePaths

DEFAULT_HOME = ".ratchet"
NEVER_STARTED = "service-not-started"
START_IT = "start it with `ratchet serve`"


def home_directory(home: str | os.PathLike[str] | None = None) -> Path:
    """The run directory: the argument, else ``RATCHET_HOME``, else ``./.ratchet``; absolute."""
    return Path(home or os.environ.get(environment.HOME) or DEFAULT_HOME).expanduser().absolute()


def find_service(server: str | None, home: str | os.PathLike[str] | None) -> str:
    """Base URL, read afresh at every call: a restart may change it. Raises ``ServiceUnreachable``, ``Refused``."""
    given = server or (os.environ.get(environment.SERVER) if home is None else None)
    if given:
        return _checked(given)
    file = HomePaths(home_directory(home)).service_file
    try:
        return ServiceFile.model_validate_json(file.read_bytes()).url.rstrip("/")
    except FileNotFoundError:
        raise ServiceUnreachable(
            f"no service is running for the run directory {file.parent}: {START_IT}, "
            f"or name a server with --server or {environment.SERVER}",
            code=NEVER_STARTED,
        ) from None
    except (ValidationError, OSError) as error:
        raise ServiceUnreachable(f"{file} cannot be read ({error}): {START_IT} again") from None


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise Refused(f"server address {url!r} must begin with http:// or https://", code="invalid-address")
    return url.rstrip("/")
