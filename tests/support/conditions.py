"""The tests under conditions that a developer's machine seldom has: ``python -m tests.support.conditions``.

Arguments: ``[NAME ...] [-- ARGUMENT_OF_PYTEST ...]``.

Without a name every condition is tried, one after the other. The last lines of the output are a table: how
long each run took, what passed, and which tests it skips and ``plain`` does not (+), or the reverse (-). Exit code: 0 when
every run passed and no list differs. A condition that this machine cannot make (a time namespace takes root) says so in its row.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PYTEST: Final = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
SEED: Final = "20261125"
_UPTIME: Final = 60  # seconds that the machine has been up for, under "boot"
_OTHER_USER: Final = 54321


@dataclass
class Setting:
    """What a run of pytest is started with: ``[*before, *PYTEST, *arguments]`` under ``variables``."""

    before: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


class NotHere(Exception):
    """This machine cannot make the condition."""


@contextmanager
def plain() -> Iterator[Setting]:
    yield Setting()


@contextmanager
def boot() -> Iterator[Setting]:
    """The machine was booted a minute ago: its monotonic clocks are small."""
    ago = max(int(float(Path("/proc/uptime").read_text().split()[0])) - _UPTIME, 0)
    # Offsets count from the machine's own clocks, also where this process runs under such a condition itself.
    _, here = Path("/proc/self/timens_offsets").read_text().splitlines()
    offset = f"{int(here.split()[1]) - ago}"
    before = ["unshare", "--time", "--boottime", offset, "--monotonic", offset, "--"]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        raise NotHere("no time namespace; this takes root and Linux 5.6")
    yield Setting(before)


@contextmanager
def zone() -> Iterator[Setting]:
    """A time zone that is no whole number of hours away from UTC, and a locale in which "I" is not the capital of "i"."""
    names = subprocess.run(["locale", "-a"], capture_output=True, text=True, check=False).stdout.lower().split()
    other = "tr_TR.UTF-8" if "tr_tr.utf8" in names else "C"
    yield Setting(variables={"TZ": "Pacific/Chatham", "LC_ALL": other, "LANG": other})


@contextmanager
def user() -> Iterator[Setting]:
    """Another user than root. The repository stays root's; the account, and an interpreter below a home that only root may enter,
    are shown to the tests in a mount namespace."""
    if os.geteuid():
        raise NotHere("only root can become another user")
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        at, hidden, accounts = Path(place, "home"), Path(place, "python"), Path(place, "passwd")
        at.mkdir()
        os.chown(at, _OTHER_USER, _OTHER_USER)
        hidden.mkdir()
        line = f"ann:x:{_OTHER_USER}:{_OTHER_USER}::{at}:/bin/sh\n"
        accounts.write_text(Path("/etc/passwd").read_text() + line)
        script = f"mount --bind {accounts} /etc/passwd"
        python = Path(sys.base_prefix).resolve()
        if closed := next((folder for folder in reversed(python.parents) if not folder.stat().st_mode & 0o001), None):
            script += f"""
                mount --bind {python} {hidden}
                mount -t tmpfs -o mode=755 none {closed}
                mkdir -p {python}
                mount --move {hidden} {python}"""
        script += f"""
            exec setpriv --reuid {_OTHER_USER} --regid {_OTHER_USER} --clear-groups --inh-caps=-all --bounding-set=-all \\
                -- "$@\""""
        before = ["unshare", "--mount", "sh", "-e", "-c", script, "sh"]
        yield Setting(before, variables={"HOME": str(at), "TMPDIR": str(at), "USER": "ann", "LOGNAME": "ann"})


@contextmanager
def home() -> Iterator[Setting]:
    """A HOME that cannot be written to; temporary files lie on another file system than the repository."""
    if os.geteuid():
        raise NotHere("only root can mount a read-only HOME")
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        at, other = Path(place, "home"), Path(place, "tmp")
        at.mkdir()
        other.mkdir()
        script = f'mount -t tmpfs -o ro none {at} && mount -t tmpfs none {other} && chmod 1777 {other} && exec "$@"'
        yield Setting(
            ["unshare", "--mount", "sh", "-c", script, "sh"], variables={"HOME": str(at), "TMPDIR": str(other)}
        )


@contextmanager
def order() -> Iterator[Setting]:
    """Files in random order, and the tests of each."""
    yield Setting(arguments=["--random-order", "--random-order-bucket=module", f"--random-order-seed={SEED}"])


@contextmanager
def cpu() -> Iterator[Setting]:
    """One CPU."""
    yield Setting(["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))])


CONDITIONS: Final = {made.__name__: made for made in (plain, boot, zone, user, home, order, cpu)}


@dataclass
class Outcome:
    passed: bool
    seconds: float
    counts: str
    skipped: frozenset[str]


def run(name: str, arguments: Sequence[str]) -> Outcome:
    """The outcome of pytest with these arguments under a condition. Raises ``NotHere``."""
    with CONDITIONS[name]() as setting, tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        report = Path(place, "report.xml")
        command = [*setting.before, *PYTEST, *setting.arguments, f"--junitxml={report}", *arguments]
        print(f"==> {name}: {shlex.join(command)}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **setting.variables}, check=False).returncode
        seconds = time.monotonic() - began
        if not report.exists():
            return Outcome(False, seconds, f"pytest ended with {code}", frozenset())
        suite = ET.parse(report).getroot()[0]
        cases = [case for case in suite.iter("testcase") if case.find("skipped") is not None]
        skipped = frozenset(f"{case.get('classname')}::{case.get('name')}" for case in cases)
        counts = ", ".join(f"{suite.get(word)} {word}" for word in ("tests", "failures", "errors", "skipped"))
        return Outcome(code == 0, seconds, counts, skipped)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CONDITIONS))
    own, arguments = sys.argv[1:], ["-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
    if "--" in own:
        at = own.index("--")
        own, arguments = own[:at], own[at + 1 :]
    names = parser.parse_args(own).names or list(CONDITIONS)
    if unknown := [name for name in names if name not in CONDITIONS]:
        parser.error(f"no condition {unknown[0]}; there are {', '.join(CONDITIONS)}")
    outcomes: dict[str, Outcome] = {}
    rows, good = [], True
    for name in names:
        try:
            outcomes[name] = found = run(name, arguments)
        except NotHere as why:
            rows.append(f"{name:6} not run: {why}")
            continue
        usual = outcomes.get("plain", found).skipped
        differs = [f"+{test}" for test in sorted(found.skipped - usual)] + [
            f"-{test}" for test in sorted(usual - found.skipped)
        ]
        good &= found.passed and not differs
        rows.append(f"{name:6} {found.seconds:5.0f} s  {found.counts}")
        rows += [
            f"       {test} (skipped here, not in plain)"
            if test[0] == "+"
            else f"       {test} (skipped in plain alone)"
            for test in differs
        ]
    print("\n".join(rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
