"""The client's configuration file: a server, and a token with the server that it belongs to. An invalid file is rejected, since
commands would otherwise be sent to another service."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ratchet_contract import env_vars
from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.errors import Refused

_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ConfigFile:
    """The content of the configuration file. ``token`` is sent only to ``token_server``. The two addresses are as written in the
    file, and may not have the form that ``normalise_url`` returns."""

    server: str | None = None
    token: str | None = None
    token_server: str | None = None


def config_path() -> Path:
    """Return the absolute path of the configuration file, by ``RATCHET_CONFIG`` or its default; the file need not exist."""
    given = os.environ.get(env_vars.CONFIG)
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification: a relative path is invalid and is treated as not set.
    root = Path(base) if base.startswith("/") else Path.home() / ".config"
    return root / "ratchet" / "config.json"


def read_config(path: Path) -> ConfigFile:
    """Return the content of the configuration file, empty if it does not exist. Raise ``Refused`` if it is malformed or
    unreadable, or has a token and others may access it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = json.loads(file.read().decode("utf-8"))
    except FileNotFoundError:
        return ConfigFile()
    except OSError as error:
        raise _refusal(path, f"cannot be read ({error.strerror or error})", "make it readable for you, or") from None
    except (ValueError, RecursionError) as error:
        raise _refusal(path, f"is not JSON ({error})", "correct it, or") from None
    config = _validated(path, data)
    if config.token is not None and stat.S_IMODE(mode) & 0o077:
        raise Refused(
            f"{path} holds a token and others may read it: chmod 600 {path} (and replace the token if others had access)",
            code="invalid-config",
        )
    return config


def _validated(path: Path, data: Any) -> ConfigFile:
    """Return the decoded JSON ``data`` as a ``ConfigFile``. Raise ``Refused`` for wrong keys or types. Addresses and token
    are not checked."""
    known = [field.name for field in fields(ConfigFile)]
    if not isinstance(data, dict):
        raise _refusal(path, "is not a JSON object", "correct it, or")
    for key, value in data.items():
        if key not in known:
            raise _refusal(path, f"has an unknown key {key!r} (known: {', '.join(known)})", "remove the key, or")
        if not isinstance(value, str) or not value:
            raise _refusal(path, f"has no string under {key!r}", "correct it, or")
    if ("token" in data) != ("token_server" in data):
        raise _refusal(path, "must have token and token_server together", "correct it, or")
    return ConfigFile(**data)


def _refusal(path: Path, what: str, first: str) -> Refused:
    """Return the error for the configuration file. ``what``: what is wrong; ``first``: a remedy, as text that ends in "or"."""
    return Refused(f"the configuration {path} {what}: {first} remove the file", code="invalid-config")


def write_config(path: Path, config: ConfigFile) -> None:
    """Replace the configuration file atomically, readable only by its owner. Raise ``Refused`` if it cannot be written."""
    text = json.dumps({k: v for k, v in asdict(config).items() if v is not None}, indent=2) + "\n"
    target = path.resolve()  # a symbolic link (into a directory of dot files) is kept
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(target, text.encode(), durable=True, mode=0o600)
    except OSError as error:
        what = f"the configuration {path} cannot be written ({error.strerror or error})"
        raise Refused(f"{what}: name another file with {env_vars.CONFIG}", code="invalid-config") from None


def normalise_url(url: str) -> str:
    """Return the canonical form of a server's address. Raise ``Refused`` if it is not a plain http or https address."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    if parts.scheme not in _PORTS or not host:
        text = f"server address {url!r} must be like https://host or http://host:8000"
        raise Refused(text, code="invalid-address")
    if parts.username is not None or parts.query or parts.fragment:
        text = (
            "a server address has no user, password, query or fragment; a token is set with `ratchet config set token`"
        )
        raise Refused(text, code="invalid-address")
    where = f"[{host}]" if ":" in host else host
    shown = "" if port in (None, _PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{where}{shown}{parts.path.rstrip('/')}"
