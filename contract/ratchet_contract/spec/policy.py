"""The spec's ``policy``, such as budgets, deadlines, time to stop, and the meaning of a script's own exit codes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from ratchet_contract.errors import FieldProblem
from ratchet_contract.exit_codes import RESERVED
from ratchet_contract.spec.types import Seconds, SpecModel

_RANGE: Final = re.compile(r"(\d{1,3})-(\d{1,3})", re.ASCII)
MAX_CODE: Final = 255


def _codes(value: Any) -> Any:
    """Return one item of ``ExitRule.codes`` unchanged: a number, or a range like ``10-19``. Raises ``ValueError`` for anything
    else."""
    if isinstance(value, str):
        match = _RANGE.fullmatch(value)
        if match is None or int(match[1]) > int(match[2]):
            raise ValueError(f"a range of exit codes must be like '10-19', the smaller one first, not {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"an exit code is a number, or a range like '10-19', not {value!r}")
    return value


def codes_of(item: int | str) -> range:
    """Return the exit codes of one item of ``ExitRule.codes``, which is a number or a text like ``10-19``."""
    if isinstance(item, int):
        return range(item, item + 1)
    low, _, high = item.partition("-")
    return range(int(low), int(high) + 1)


class ExitRule(SpecModel):
    """What happens when a rank's own code ends its process with one of ``codes``."""

    codes: list[Annotated[int | str, BeforeValidator(_codes)]] = Field(
        min_length=1,
        max_length=64,
        description="Numbers from 2 to 255, or ranges like '10-19'. Codes that Ratchet uses itself are refused.",
    )
    action: Literal["retry", "fail", "preempted"] = Field(
        description="retry: another attempt, which counts against nothing; fail: the job ends at once; preempted: another "
        "attempt, which counts against max_preemptions.",
    )

    def matches(self, code: int) -> bool:
        return any(code in codes_of(item) for item in self.codes)


class PolicySpec(SpecModel):
    max_preemptions: int | None = Field(
        None, ge=0, description="Number of preemptions that are allowed; one more ends the job. null: unlimited."
    )
    preemptible: bool = Field(
        True,
        description="true: if a job of higher priority waits for slots, the service may stop this job, which saves a "
        "checkpoint first. A script without a Session is never stopped in this way.",
    )
    max_failures: int = Field(
        3,
        ge=0,
        description="Number of failed or lost attempts that are allowed; one more ends the job. An attempt that saves a "
        "new step resets the count. The job also ends after three attempts in a row that save no new step, or after "
        "max_failures of them, if that is more and the last one was killed, ran out of memory or was lost. And it ends "
        "after two attempts in a row with the same exception at the same line before their first step, except for "
        "errors that may pass, such as those of a network.",
    )
    exit_codes: list[ExitRule] = Field(
        [],
        max_length=32,
        description="The meaning of your own code's exit codes, such as `sys.exit(42)` in a script. Codes without a "
        "rule are failures. With any action, three attempts in a row that save no new step end the job. This does "
        "not apply to a script without a Session, since its steps are unknown: limit its job by timeout. A retry is "
        "delayed as after a failure (backoff).",
    )
    on_hook_mismatch: Literal["fail", "reset", "redistribute"] = Field(
        "fail",
        description="What to do if a checkpoint's hook state does not fit the job. fail: end the job. redistribute: "
        "carry over as much as possible, by parameter name. reset: reset the hook's state. The resume report shows "
        "the result.",
    )
    timeout: Seconds | None = Field(
        None, description="Limit on the running time of all attempts together. Time in a queue does not count."
    )
    startup_deadline: Seconds | None = Field(
        None,
        description="Longest time from launch to the first step. After this time, the attempt ends as a hang. null: "
        "300 s, or twice the longest start so far if that is more, at most 1800 s.",
    )
    step_deadline: Seconds | None = Field(
        None,
        description="Longest silence (time without progress) of a rank. After this time, the attempt ends as a hang. "
        "null: Ratchet derives the deadline from the silences so far. At first the deadline is its upper limit: 300 "
        "s, or twice the longest silence of an earlier attempt if that is more, at most 1800 s. After an hour of "
        "training it is ten times the longest silence, but at least 120 s and at most the upper limit.",
    )
    stop_grace: Seconds = Field(120.0, description="Time from a stop request until ranks are killed.")
    preemption_notice: Seconds | None = Field(
        None,
        description="Time from SIGTERM until the machine is gone, if that is less than stop_grace (spot instances: 30 "
        "to 120 s). If a save is expected to take longer than the rest of this time, it is not begun. null: the value "
        "of stop_grace.",
    )
    backoff: Seconds = Field(
        1.0,
        description="First delay after a failure. The delay doubles with each failure, with jitter, up to 5 minutes. "
        "There is no delay after the first failure since the last progress, if its cause is rank-killed, "
        "oom or exception.",
    )
    exclude_nodes: Literal["auto", "off"] = Field(
        "auto",
        description="auto: on Kubernetes and Slurm, an attempt does not start on a node that has caused two ends of this "
        "job's attempts in the last 24 hours, by faults that may be the hardware's. At most three nodes are excluded, and "
        "as many known machines as the job needs always remain. The launcher local has one machine and "
        "excludes nothing. off: no node is excluded.",
    )


def exit_code_problems(policy: PolicySpec) -> list[FieldProblem]:
    """Return problems with the exit codes of all rules: reserved or impossible ones, and ones that are named twice."""
    out: list[FieldProblem] = []
    taken: dict[int, str] = {}
    for i, rule in enumerate(policy.exit_codes):
        for k, item in enumerate(rule.codes):
            pointer = f"/policy/exit_codes/{i}/codes/{k}"
            codes = codes_of(item)
            wrong = [code for code in codes if not 0 < code <= MAX_CODE or code in RESERVED]
            if wrong:
                text = _reserved_message(wrong[0])
                out.append(FieldProblem(pointer=pointer, code="exit-code-reserved", detail=text))
            twice = next((code for code in codes if code in taken), None)
            if twice is not None:
                text = f"{twice} is already named by {taken[twice]}: keep it in one rule"
                out.append(FieldProblem(pointer=pointer, code="exit-code-twice", detail=text))
            taken |= dict.fromkeys((code for code in codes if code not in taken), pointer)
    return out


def _reserved_message(code: int) -> str:
    """Return why no rule may name the code."""
    if not 0 <= code <= MAX_CODE:
        return f"{code} is not an exit code of a process: the range is 0 to {MAX_CODE}"
    used = ", ".join(map(str, sorted(RESERVED)))
    return f"{code} already has a meaning ({RESERVED[code]}): use a code other than {used}"
