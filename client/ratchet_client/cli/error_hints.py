"""Hints at the command to type next, for errors that are raised where the command line is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ratchet_contract.errors import RatchetError

_NEXT: Final[dict[str, str]] = {
    "job-not-found": "`ratchet list` shows the jobs",
    "attempt-not-found": "`ratchet attempts JOB` shows the attempts",
    "checkpoint-not-found": "`ratchet checkpoints ls JOB` lists the checkpoints",
    "file-not-found": "`ratchet files JOB` lists the files",
    "hook-not-found": "`ratchet hooks` shows the hooks",
    "not-running": "`ratchet get JOB` shows its phase, `ratchet wait JOB --until RUNNING` waits until it trains",
    "wrong-phase": "`ratchet get JOB` shows the job's phase, `ratchet wait JOB` waits until it has ended",
    "job-ended": "`ratchet resume JOB` (with changed code: `--code DIR`) continues a failed or cancelled job, "
    "`ratchet fork JOB` starts a new one from it",
    "from-step-needs-stop": "`ratchet suspend JOB`, then `ratchet wait JOB --until SUSPENDED`, then repeat the command",
    "world-needs-stop": "`ratchet suspend JOB`, then `ratchet wait JOB --until SUSPENDED`, then repeat the command",
    "code-needs-stop": "`ratchet suspend JOB`, then `ratchet wait JOB --until SUSPENDED`, then repeat the command",
    "hook-needs-stop": "`ratchet suspend JOB`, then `ratchet wait JOB --until SUSPENDED`, then repeat the command",
    "policy-needs-stop": "`ratchet suspend JOB`, then `ratchet wait JOB --until SUSPENDED`, then repeat the command",
    "world-size-mismatch": "`--on-hook-mismatch redistribute` allows it (fork: `--set policy.on_hook_mismatch=redistribute`)",
    "hook-mismatch": "`--on-hook-mismatch redistribute` or `reset` allows it (fork: `--set policy.on_hook_mismatch=reset`)",
    "idempotency-key-reused": "give another --idempotency-key, or leave it out",
    "token-unknown": "`ratchet config` shows which token is sent, and to which server",
    "token-revoked": "an admin creates another: `ratchet token create --owner NAME`",
    "not-allowed": "`ratchet token whoami` shows your permissions",
    "invalid-spec": "docs/spec.md has every key; `ratchet submit FILE --dry-run` checks without submitting",
    "service-fault": "see the service's log for details; try again",
    "internal-error": "the service's log contains the incident; try again",
    "database-unavailable": "try again; the service's log contains the database error",
}

_STRICT: Final[dict[str, str]] = {
    "code-mismatch": "`ratchet fork JOB --set determinism=warn --set code.path=DIR` starts a job that may use other code",
    "world-size-mismatch": "`ratchet fork JOB --set determinism=warn --set policy.on_hook_mismatch=redistribute "
    "--set world.ranks_per_node=N` starts a job that allows it",
    "hook-mismatch": "`ratchet fork JOB --set determinism=warn --set policy.on_hook_mismatch=reset --hook NAME` "
    "starts a job that allows it",
}
"""Used if determinism is strict, where ``--on-hook-mismatch`` does not help."""

_TRAINED: Final = (
    "it has done all its steps: `ratchet fork JOB --checkpoint ID` starts a new job from an earlier checkpoint, of those that "
    "`ratchet checkpoints ls JOB` shows"
)


def hint(error: RatchetError, job: str | None) -> str | None:
    """Return a line that says what to do about ``error``. Return None if no remedy is known, or if the error's own text already
    has one. ``job``: the job as named on the command line."""
    detail = error.detail
    text = (_STRICT if "determinism is strict" in detail else _NEXT).get(error.code)
    if any(e.code == "not-a-directory" and e.pointer.endswith("/code/path") for e in error.errors):
        return "if it is a directory of this machine and the service is on another one: `--upload` sends it"
    if any(e.code == "no-snapshot" for e in error.errors):
        return None  # the error says what to do, and no key is wrong
    if error.code == "job-ended" and "(SUCCEEDED)" in detail:
        text = _TRAINED
    if text is None or "`ratchet " in detail:  # the error already names a command
        return None
    return text if job is None else text.replace("JOB", job)
