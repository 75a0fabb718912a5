"""Asks the job's interpreter about the user's own code: in a process of its own, without a GPU, for a limited time.

What that code starts ends with it: its process group, and whatever left the group but still has the probe's variable.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ratchet_contract.errors import FieldProblem
from ratchet_contract.spec import JobSpec
from ratchet_hooks.specs import CustomSpec
from ratchet_service.credentials import inherited
from ratchet_service.launchers import processes

log = logging.getLogger("ratchet.service")
HOOK_SECONDS: Final = 10.0
_START_SECONDS: Final = 60.0  # for the interpreter and torch, which may come from a cold disk
_END_SECONDS: Final = 10.0
_LONGEST_ANSWER: Final = 1 << 20
_MARK: Final = "RATCHET_HOOK_PROBE"


@dataclass(frozen=True)
class Probe:
    """One interpreter, and the directories where a job's code is. ``seconds``: how long the user's code may take."""

    python: str
    spec: JobSpec
    path: Sequence[str]
    environ: Mapping[str, str]
    seconds: float = HOOK_SECONDS

    def hook(self, hook: CustomSpec) -> list[FieldProblem]:
        """What is wrong with a hook of the user's own; the pointers are those of the spec."""
        request = hook.model_dump(mode="json", include={"hook", "state", "state_args"})
        try:
            answer = self._ask(request)
            return [
                FieldProblem(pointer=f"/hook/{p['key']}", code=p["code"], detail=p["detail"])
                for p in answer["problems"]
            ]
        except TimeoutError:
            text = (
                f"importing {hook.hook} took longer than {self.seconds:g} s: a module of hooks is to define them, not to train, "
                "wait or download; put what takes long into functions"
            )
            return [FieldProblem(pointer="/hook/hook", code="hook-check-timeout", detail=text)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            text = f"importing {hook.hook} with {self.python} ended the process: {error}"
            return [FieldProblem(pointer="/hook/hook", code="hook-import-failed", detail=text)]

    def shapes(self) -> list[list[int]] | None:
        """Shapes of the parameters of the job's task; None where it does not tell them, for whatever reason."""
        task = self.spec.task
        if task is None:
            return None
        try:
            shapes = self._ask({"task": task.entrypoint, "task_args": task.args})["shapes"]
        except (OSError, ValueError, KeyError, TypeError):  # TimeoutError is an OSError
            return None
        return None if shapes is None else [[int(n) for n in shape] for shape in shapes]

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ``TimeoutError``, ``OSError`` when there is no process, ``ValueError`` when it ended without an answer."""
        mark = uuid.uuid4().hex
        with tempfile.TemporaryDirectory(prefix="ratchet-probe-") as directory:
            target, question = Path(directory, "answer.json"), Path(directory, "question.json")
            question.write_text(json.dumps({**request, "path": list(self.path), "asker": os.getpid()}))
            with question.open("rb") as stdin:
                child = subprocess.Popen(
                    [self.python, "-P", "-m", "ratchet_hooks.probe", str(target)],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=self.path[0] if self.path else "/",
                    env=self._environment() | {_MARK: mark},
                    start_new_session=True,
                )
            try:
                self._wait(child, target)
            finally:
                _end(child, mark)
            if not target.exists():
                raise ValueError(_ending(child.returncode))
            with target.open("rb") as file:
                answer: dict[str, Any] = json.loads(file.read(_LONGEST_ANSWER))
            return answer

    def _wait(self, child: subprocess.Popen[bytes], target: Path) -> None:
        begun = target.with_name(f"{target.name}.begun")
        end, counting = time.monotonic() + _START_SECONDS, False
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if not counting and begun.exists():
                end, counting = time.monotonic() + self.seconds, True
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.01)

    def _environment(self) -> dict[str, str]:
        """As the ranks will have it, without a GPU; and nothing is written into the user's directory."""
        env = inherited(self.environ) | self.spec.env
        secrets = {name: self.environ.get(secret.from_env) for name, secret in self.spec.secrets.items()}
        env |= {name: value for name, value in secrets.items() if value is not None}
        return env | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _end(child: subprocess.Popen[bytes], mark: str) -> None:
    """Nothing of it is left: the group first (its leader is not reaped yet, so the number is still the group's), then whoever has
    left the group, until none is found; what multiplies faster than it can be killed, or hangs in the kernel, is given up."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    end = time.monotonic() + _END_SECONDS
    while others := [pid for pid in processes.with_variable(_MARK, mark) if pid != child.pid]:
        if time.monotonic() > end:
            log.error("processes %s of a user's hook could not be ended", others)
            break
        for pid in others:
            processes.kill(pid)
        time.sleep(0.001)
    child.wait()


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code} in the middle of the import"
