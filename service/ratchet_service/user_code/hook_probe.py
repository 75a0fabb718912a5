"""Queries the job's interpreter about the user's own code: in a separate process, without a GPU, for a limited time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter

from ratchet_contract.errors import FieldProblem
from ratchet_contract.spec.job import JobSpec
from ratchet_hooks.specs.hook_specs import CustomSpec
from ratchet_service.isolation import subprocess_query
from ratchet_service.isolation.sandbox import NO_SANDBOX, Sandbox, inherited_environ, probe_limits

HOOK_SECONDS: Final = 10.0
START_SECONDS: Final = 60.0  # for the interpreter and torch, which may come from a cold disk
_Shape = Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(max_length=64)]
_SHAPES: Final = TypeAdapter[list[list[int]] | None](list[_Shape] | None)


@dataclass(frozen=True)
class Probe:
    """Queries one interpreter about the code of one job, in a separate process without a GPU. ``path``: first directories of
    ``sys.path``; ``seconds``: time limit once torch is imported."""

    python: str
    spec: JobSpec
    path: Sequence[str]
    environ: Mapping[str, str]
    seconds: float = HOOK_SECONDS
    sandbox: Sandbox = NO_SANDBOX

    def check_hook(self, hook: CustomSpec) -> list[FieldProblem]:
        """Have the interpreter import ``hook``, and return the problems found, with pointers into the spec; empty if there are
        none. An import that fails or takes too long is a problem, too. Blocks. Raise ``StartTimeout`` if torch is not imported
        in time."""
        request = {"hook": hook.hook, "state": hook.state, "state_args": hook.state_args}
        try:
            answer = self._query(request)
            return [
                FieldProblem(pointer=f"/hook/{p['key']}", code=p["code"], detail=p["detail"])
                for p in answer["problems"]
            ]
        except subprocess_query.StartTimeout:
            raise
        except TimeoutError:
            text = (
                f"importing {hook.hook} took longer than {self.seconds:g} s: a module of hooks must only define them, not "
                "train, wait or download; move slow code into functions"
            )
            return [FieldProblem(pointer="/hook/hook", code="hook-check-timeout", detail=text)]
        except OSError as error:
            text = (
                f"importing {hook.hook} with {self.python} was not tried, since no process could be started: {error}. This is "
                "no fault of the hook: repair what the error names, then try again"
            )
            return [FieldProblem(pointer="/hook/hook", code="hook-import-failed", detail=text)]
        except (ValueError, KeyError, TypeError) as error:
            text = f"importing {hook.hook} with {self.python} ended the process: {error}"
            return [FieldProblem(pointer="/hook/hook", code="hook-import-failed", detail=text)]

    def shapes(self) -> list[list[int]] | None:
        """Return the shapes of the task's parameters, which a separate process reports. Return None if the job has no task, or
        no valid answer comes."""
        task = self.spec.task
        if task is None:
            return None
        try:
            return _SHAPES.validate_python(self._query({"task": task.entrypoint, "task_args": task.args})["shapes"])
        except (OSError, ValueError, KeyError):  # TimeoutError is an OSError
            return None

    def _query(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the interpreter's answer to ``request``. Raise ``StartTimeout``, ``TimeoutError``, ``OSError``, or
        ``ValueError`` for no valid answer."""
        return subprocess_query.query_process(
            [self.python, "-P", "-m", "ratchet_hooks.probe"],
            {**request, "path": list(self.path)},
            cwd=self.spec.code.path if self.spec.code is not None else "/",
            env=self._environment(),
            timeout_seconds=self.seconds,
            start_timeout_seconds=START_SECONDS,
            sandbox=self.sandbox,
            limits=probe_limits(self.spec, START_SECONDS + self.seconds),
        )

    def _environment(self) -> dict[str, str]:
        """Return the variables that ranks get from ``environ`` and the spec, with ``from_env`` secrets and changes for a
        probe."""
        env = inherited_environ(self.environ) | self.spec.env
        secrets = {name: self.environ.get(secret.from_env or "") for name, secret in self.spec.secrets.items()}
        env |= {name: value for name, value in secrets.items() if value is not None}
        return env | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
