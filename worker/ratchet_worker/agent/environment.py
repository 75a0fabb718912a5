"""The environment with a job's requirements: built once in the run directory, by digest, and used by all attempts with the same
digest, also of other jobs of the same user. ``environment_build`` is the process that installs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ratchet_contract import env_vars as names
from ratchet_contract.atomic_write import ensure_dir, write_atomic
from ratchet_contract.errors import UserError
from ratchet_contract.paths import NodePaths
from ratchet_contract.phases import Cause
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.messages import LaunchFile
from ratchet_contract.version import RATCHET_VERSION
from ratchet_store.filesystem.durable_io import remove_tree
from ratchet_worker.agent.checkpoint_download import WaitFor
from ratchet_worker.agent.environment_build import INCOMPLETE, Order
from ratchet_worker.agent.rank_environment import interpreter, secret_values
from ratchet_worker.ipc.log_lines import now
from ratchet_worker.ipc.result_files import Conclusion, NotStarted

RECORD: Final = "ratchet-environment.json"
"""File in an environment's directory, written last: without it the environment is not used."""
VERSIONS: Final = ".versions"
"""End of the name of a file with the versions that were first installed for the same requirements and options of pip. It is kept:
later builds, also for another interpreter, install these versions."""
KEPT: Final = 10
"""Environments of a user that are kept although no attempt uses them, the last used ones."""
BUILD_SECONDS: Final = 3600.0
_PROBE_SECONDS: Final = 60.0
_TAIL_BYTES: Final = 1 << 18
_PROBE: Final = "from ratchet_worker.agent.environment_build import describe_base; print(describe_base())"
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_INHERITED: Final = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
)
_TRANSIENT: Final = re.compile(
    r"Retrying \(Retry\(|ConnectionError|NewConnectionError|ReadTimeout|ConnectTimeout|ProtocolError|IncompleteRead|"
    r"HTTP error 5\d\d|\b5\d\d Server Error|No space left on device|Disk quota exceeded"
)
"""What pip writes about faults of the network or the disk, which another attempt may not have."""


def prepare(
    launch: LaunchFile, paths: NodePaths, inherited: Mapping[str, str], wait_for: WaitFor, note: Callable[[str], None]
) -> tuple[str, str]:
    """Return interpreter and digest of the environment for the job's requirements, which is built first if it is not there. It
    is not deleted while this process lives. Blocks for ``BUILD_SECONDS`` at most. ``note`` reports to the job's history. Raises
    ``NotStarted``, and ``UserError`` if the environment cannot be built."""
    spec = launch.spec.environment
    assert spec is not None and launch.environments_dir is not None
    tmp = paths.tmp / "environment"
    ensure_dir(tmp)
    env = _variables(launch, inherited) | {
        "HOME": str(tmp), "TMPDIR": str(tmp), names.ATTEMPT_DIR: launch.attempt_dir, names.NODE_DIR: str(paths.root),
    }  # fmt: skip
    python = interpreter(launch)
    wanted = _wanted(launch)
    digest = _digest([wanted, RATCHET_VERSION, _describe(python, env)])
    root = Path(launch.environments_dir) / str(os.geteuid())
    ensure_dir(root)
    root.chmod(0o700)
    place, deadline = root / digest[:32], time.monotonic() + BUILD_SECONDS
    versions = root / f"{wanted[:32]}{VERSIONS}"
    lock = os.open(root / f"{place.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def locked() -> bool | None:
        """Lock the environment. True if it is complete, False if this process is to build it, None if another one does."""
        complete = (place / RECORD).exists()
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if complete else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return (place / RECORD).exists() or (None if complete else False)

    if locked() is None:
        note(f"another attempt builds the environment {digest[:12]}: waiting for it")
    found = wait_for(locked, deadline)
    if found is None:
        raise _retry(f"another attempt has been building the environment {place} for {BUILD_SECONDS:g} s")
    if found and (changes := _changes(place)):
        text = f"the environment {digest[:12]} was changed after its build ({changes}), as by pip in a job"
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            note(f"{text}: it is built again")
            found = False
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
            note(f"{text}. Other attempts use it, so it is used as it is. Name all packages in the requirements")
    if not found:
        note(f"building the environment {digest[:12]} with {pluralize(len(spec.lines), 'requirement')}")
        begin, first = time.monotonic(), versions.read_text().splitlines() if versions.exists() else []
        order = Order(
            parent=os.getpid(), directory=place, tmp=tmp, hidden=Path(launch.environments_dir).parent,
            requirements=spec.lines, versions=first, memory=launch.spec.memory_per_rank,
            open_files=launch.spec.resources.open_files,
        )  # fmt: skip
        (place / RECORD).unlink(missing_ok=True)  # first: what is partly deleted is not used
        remove_tree(place)  # what a killed build has left
        try:
            place.mkdir(mode=0o700)
            unconfined = _build(python, order, env, paths, launch.log_bytes, wait_for, deadline)
        except UserError as error:
            remove_tree(place)
            if not first:
                raise
            cure = f"\nThe versions must be those of the first build. To have them chosen again, delete {versions}"
            raise UserError(error.detail + cure) from None
        except BaseException:
            remove_tree(place)
            raise
        packages = _packages(place)
        known = {line.partition("==")[0] for line in first}
        first += [line for line in packages if line.partition("==")[0] not in known]
        write_atomic(versions, "".join(f"{line}\n" for line in first).encode(), durable=True)
        record = {"digest": digest, "requirements": spec.lines, "packages": packages, "built_at": now()}
        write_atomic(place / RECORD, json.dumps(record, indent=1).encode(), durable=True)
        text = f"built the environment {digest[:12]} in {time.monotonic() - begin:.0f} s: {', '.join(packages) or 'no packages'}"
        if unconfined:
            text += f". The build was not confined, since the system does not permit it: {unconfined}"
        note(f"{text[:3000]}. The output of pip: {paths.environment_log}")
    fcntl.flock(lock, fcntl.LOCK_SH)
    os.utime(place / RECORD)
    _delete_unused(root, place)
    return str(place / "bin" / "python"), digest  # the lock is held until this process ends


def _build(
    python: str,
    order: Order,
    env: Mapping[str, str],
    paths: NodePaths,
    max_bytes: int,
    wait_for: WaitFor,
    deadline: float,
) -> str:
    """Run the process that builds, until ``deadline``. Return why it was not confined; empty if it was. ``max_bytes``: the most
    that it may write into its log. Raises ``NotStarted`` and ``UserError``."""
    with paths.environment_log.open("ab") as log:
        process = subprocess.Popen(
            [python, "-P", "-m", "ratchet_worker.agent.environment_build"],
            cwd=order.tmp, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)

    def ended() -> int | None:
        if paths.environment_log.stat().st_size > max_bytes:
            raise UserError(
                f"environment: the build has written more than {max_bytes >> 20} MiB to {paths.environment_log}"
            )
        return process.poll()

    try:
        with suppress(BrokenPipeError), process.stdin as stdin:  # if it has ended already, its output says why
            stdin.write(order.model_dump_json().encode())
        code = wait_for(ended, deadline)
        unconfined = process.stdout.read() or b""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
    if code == 0:
        return unconfined.decode(errors="replace").strip()
    with paths.environment_log.open("rb") as output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
        written = output.read().decode(errors="replace")
    last = "\n".join([line for line in written.splitlines() if line.strip()][-8:])[-1500:]
    where = f"The whole output is in {paths.environment_log}. Its end:\n{last}"
    if code is None:
        raise _retry(f"environment: the requirements were not installed within {BUILD_SECONDS:g} s. {where}")
    cure = "correct them in a new job, by `ratchet submit`, or by `ratchet fork` to continue from a checkpoint"
    if code == INCOMPLETE:
        raise UserError(f"environment: with these requirements the interpreter cannot run Ratchet: {cure}. {where}")
    if code < 0 or code > 128 or _TRANSIENT.search(written):
        raise _retry(f"environment: the requirements could not be installed now. {where}")
    raise UserError(f"environment: the requirements cannot be installed (exit code {code} of pip): {cure}. {where}")


def _retry(text: str) -> NotStarted:
    """An end of the attempt after which another attempt may succeed, for the caller to raise."""
    return NotStarted(Conclusion(Cause.LAUNCHER_ERROR, None, None, text))


def _variables(launch: LaunchFile, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the build: few inherited ones, and the spec's. Secret values are left out, except those of pip and
    of proxies. Raises ``UserError`` if a secret is missing."""
    spec = launch.spec
    env = {k: v for k, v in inherited.items() if k in _INHERITED or k.lower() in _PROXIES}
    given = spec.env | secret_values(launch, inherited)
    hidden = {*spec.secret_env, *spec.secrets}
    return env | {
        k: v
        for k, v in given.items()
        if (k not in hidden or k.startswith("PIP_") or k.lower() in _PROXIES) and not k.startswith("PYTHON")
    }


def _describe(python: str, env: Mapping[str, str]) -> str:
    """Return a text about the interpreter ``python`` and its packages, from which the digest is made. Raises ``UserError``."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROBE], env=dict(env), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_PROBE_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"the interpreter {python} of the spec (python) cannot be run: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"the interpreter {python} cannot build an environment: {last}")
    return done.stdout


def _wanted(launch: LaunchFile) -> str:
    """Return the digest of the requirements and of pip's options. Of secrets it covers only the names: a value must not be found
    by trying values until the digest fits."""
    spec = launch.spec
    assert spec.environment is not None
    secret = {*spec.secret_env, *spec.secrets}
    pip = {
        k: None if k in secret else v for k, v in {**dict.fromkeys(secret), **spec.env}.items() if k.startswith("PIP_")
    }
    return _digest([sorted(spec.environment.lines), pip])


def _digest(facts: list[Any]) -> str:
    """Return the SHA-256 in hex of ``facts`` as JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _packages(place: Path) -> list[str]:
    """Return ``name==version`` of each package in the environment's own directory, sorted."""
    found = (path.stem.partition("-") for path in place.glob("lib/python*/site-packages/*.dist-info"))
    return sorted(f"{name}=={version}" for name, _, version in found)


def _changes(place: Path) -> str:
    """Return which packages were installed (+) or removed (-) since the environment was built; empty if none."""
    try:
        built, found = json.loads((place / RECORD).read_bytes())["packages"], _packages(place)
        return ", ".join(
            [*(f"-{one}" for one in built if one not in found), *(f"+{one}" for one in found if one not in built)]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "its record cannot be read"


def _delete_unused(root: Path, own: Path) -> None:
    """Delete the environments that no process holds: what killed builds have left, and all but the ``KEPT`` last used."""
    places = [(_last_used(place), place) for place in root.iterdir() if place.is_dir() and place != own]
    for number, (at, place) in enumerate(sorted(places, reverse=True), 1):
        if at and number < KEPT:
            continue
        lock = os.open(root / f"{place.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _last_used(place) == at:  # else it was built or used meanwhile
                (place / RECORD).unlink(missing_ok=True)  # first: what is partly deleted is not used
                remove_tree(place)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _last_used(place: Path) -> float:
    """Return the time of the environment's last use in Unix seconds; 0 if it is not complete."""
    try:
        return (place / RECORD).stat().st_mtime
    except FileNotFoundError:
        return 0.0
