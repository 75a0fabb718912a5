"""The client's configuration file: a server, and the token that belongs to it.

``RATCHET_CONFIG`` names it, else it is ``ratchet/config.json`` below ``XDG_CONFIG_HOME`` (default ``~/.config``). A file that
cannot be taken as it stands is refused, never passed over: a server or a token left out unnoticed would send a command elsewhere.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import mkstemp
from typing import Any, Final
from urllib.parse import urlsplit

from ratchet_contract import environment
from ratchet_contract.errors import Refused

_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ConfigFile:
    """``token`` is sent to ``token_server`` alone, a normalised address."""

    server: str | None = None
    token: str | None = None
    token_server: str | None = None


def config_path() -> Path:
    """Where the file is, or would be; absolute."""
    given = os.environ.get(environment.CONFIG)
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification: a relative path there is invalid and counts as not set.
    root = Path(base) if base.startswith("/") else Path.home() / ".config"
    return root / "ratchet" / "config.json"


def read_config(path: Path) -> ConfigFile:
    """What the file says; an absent one says nothing. Raises ``Refused``."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = json.loads(file.read().decode("utf-8"))
    except FileNotFoundError:
        return ConfigFile()
    except OSError as error:
        raise _refused(path, f"cannot be read ({error.strerror or error})", "make it readable for you, or") from None
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"is not JSON ({error})", "mend it, or") from None
    config = _checked(path, data)
    if config.token is not None and stat.S_IMODE(mode) & 0o077:
        raise Refused(
            f"{path} holds a token and others may read it: chmod 600 {path} (and change the token if others were there)",
            code="invalid-config",
        )
    return config


def _checked(path: Path, data: Any) -> ConfigFile:
    known = [field.name for field in fields(ConfigFile)]
    if not isinstance(data, dict):
        raise _refused(path, "holds no JSON object", "mend it, or")
    for key, value in data.items():
        if key not in known:
            raise _refused(path, f"has an unknown key {key!r} (known: {', '.join(known)})", "take it out, or")
        if not isinstance(value, str) or not value:
            raise _refused(path, f"has no text under {key!r}", "mend it, or")
    if ("token" in data) != ("token_server" in data):
        raise _refused(path, "must have token and token_server together", "mend it, or")
    return ConfigFile(**data)


def _refused(path: Path, what: str, first: str) -> Refused:
    return Refused(f"the configuration {path} {what}: {first} remove the file", code="invalid-config")


def write_config(path: Path, config: ConfigFile) -> None:
    """Replace the file by rename, readable for its owner alone. Raises ``Refused``."""
    text = json.dumps({k: v for k, v in asdict(config).items() if v is not None}, indent=2) + "\n"
    target = path.resolve()  # a link into a directory of dot files stays one
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        what = f"the configuration {path} cannot be written ({error.strerror or error})"
        raise Refused(f"{what}: name another file with {environment.CONFIG}", code="invalid-config") from None


def normalised(url: str) -> str:
    """One form for one server: scheme and host in small letters, no default port, no slash at the end. Raises ``Refused``."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        host, port, parts = "", None, urlsplit("")
    if parts.scheme not in _PORTS or not host:
        text = f"server address {url!r} must be like https://host or http://host:8000"
        raise Refused(text, code="invalid-address")
    if parts.username is not None or parts.query or parts.fragment:
        text = "a server address holds no user, password, query or fragment; a token is set with `ratchet config set token`"
        raise Refused(text, code="invalid-address")
    where = f"[{host}]" if ":" in host else host
    shown = "" if port in (None, _PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{where}{shown}{parts.path.rstrip('/')}"
