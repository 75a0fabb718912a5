"""A shell that commands are typed into, one after the other, as into a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.server import wait_for

_DONE = "--- ended with "
_SECONDS = 240.0


@dataclass(frozen=True)
class Ended:
    """Exit code, and what standard output and standard error got."""

    code: int
    text: str


def commands(block: str) -> list[str]:
    """The commands of a block of the documentation, here-documents whole."""
    found: list[str] = []
    lines = iter(block.splitlines())
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        if here := re.search(r"<<'(\w+)'", line):
            while not line.endswith(f"\n{here[1]}"):
                line += "\n" + next(lines)
        found.append(line)
    return found


class Shell:
    """bash in ``directory``, with these variables and no others."""

    def __init__(self, directory: Path, variables: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as handle:
            self._bash = subprocess.Popen(
                ["bash"], cwd=directory, env=variables, stdin=subprocess.PIPE, stdout=handle, stderr=handle
            )

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def start(self, command: str) -> Callable[[], Ended | None]:
        """Type it; what is returned is None until it has ended."""
        before = self.output()
        assert self._bash.stdin is not None
        self._bash.stdin.write(f'{command}\necho "{_DONE}$?"\n'.encode())
        self._bash.stdin.flush()

        def ended() -> Ended | None:
            said = self.output()[len(before) :]
            found = re.search(rf"^{_DONE}(\d+)$", said, re.MULTILINE)
            return Ended(int(found[1]), said[: found.start()]) if found else None

        return ended

    def run(self, command: str, until: Callable[[str], object] | None = None) -> Ended:
        """To its end; with ``until`` Ctrl-C is pressed once that is true of what it has said."""
        before = len(self.output())
        ended = self.start(command)
        if until is not None:
            wait_for(lambda: ended() or until(self.output()[before:]), f"Ctrl-C for {command}", _SECONDS)
            self.interrupt()
        try:
            return wait_for(ended, f"the end of {command}", _SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.output()[-3000:]}") from None

    def child(self) -> int | None:
        """The process that runs in the foreground."""
        pid = self._bash.pid
        with suppress(FileNotFoundError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    def has_socket(self) -> bool:
        """Whether that process has a socket."""
        child = self.child()
        with suppress(OSError):
            for descriptor in Path(f"/proc/{child}/fd").iterdir():
                with suppress(OSError):
                    if str(descriptor.readlink()).startswith("socket:"):
                        return True
        return False

    def interrupt(self) -> None:
        if (child := self.child()) is not None:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGINT)

    def close(self) -> None:
        end = time.monotonic() + 20
        while (child := self.child()) is not None and time.monotonic() < end:
            self.interrupt()
            with suppress(AssertionError):
                wait_for(lambda child=child: self.child() != child, "the end of the command", 10)
        assert self._bash.stdin is not None
        with suppress(OSError):
            self._bash.stdin.close()
        self._bash.wait(10)
