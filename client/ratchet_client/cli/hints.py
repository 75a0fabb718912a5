"""What to type next, for errors whose text cannot know the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ratchet_contract.errors import RatchetError

_NEXT: Final[dict[str, str]] = {
    "job-not-found": "`ratchet list` shows the jobs",
    "attempt-not-found": "`ratchet attempts JOB` shows the attempts",
    "checkpoint-not-found": "`ratchet checkpoints ls JOB` shows what is stored",
    "file-not-found": "`ratchet files JOB` shows what there is",
    "hook-not-found": "`ratchet hooks` shows the hooks",
    "not-running": "`ratchet get JOB` shows where it is, `ratchet wait JOB --until RUNNING` waits until it trains",
    "wrong-phase": "`ratchet get JOB` shows where the job is, `ratchet wait JOB` waits until it has ended",
    "job-ended": "`ratchet resume JOB` (with changed code: `--code DIR`) lets a failed or cancelled job go on, "
    "`ratchet fork JOB` starts a new one from it",
    "from-step-needs-stop": "`ratchet suspend JOB`, then `ratchet wait JOB --until SUSPENDED`, then again",
    "world-needs-stop": "`ratchet suspend JOB`, then `ratchet wait JOB --until SUSPENDED`, then again",
    "code-needs-stop": "`ratchet suspend JOB`, then `ratchet wait JOB --until SUSPENDED`, then again",
    "hook-needs-stop": "`ratchet suspend JOB`, then `ratchet wait JOB --until SUSPENDED`, then again",
    "policy-needs-stop": "`ratchet suspend JOB`, then `ratchet wait JOB --until SUSPENDED`, then again",
    "world-size-mismatch": "`--on-hook-mismatch redistribute` allows it (fork: `--set policy.on_hook_mismatch=redistribute`)",
    "hook-mismatch": "`--on-hook-mismatch redistribute` or `reset` allows it (fork: `--set policy.on_hook_mismatch=reset`)",
    "idempotency-key-reused": "give another --idempotency-key, or leave it out",
    "token-unknown": "`ratchet config` shows which token is sent, and to which server",
    "token-revoked": "an admin makes another: `ratchet token create --owner NAME`",
    "not-allowed": "`ratchet token whoami` shows what you may",
    "invalid-spec": "docs/spec.md has every key; `ratchet submit FILE --dry-run` checks without submitting",
    "service-fault": "the service's own output tells more; try again",
    "internal-error": "the service's own output has the incident; try again",
    "database-unavailable": "try again; the service's own output tells what its database says",
}

_STRICT: Final[dict[str, str]] = {
    "code-mismatch": "`ratchet fork JOB --set determinism=warn --set code.path=DIR` makes a job that may go on with other code",
    "world-size-mismatch": "`ratchet fork JOB --set determinism=warn --set policy.on_hook_mismatch=redistribute "
    "--set world.ranks_per_node=N` makes a job that may",
    "hook-mismatch": "`ratchet fork JOB --set determinism=warn --set policy.on_hook_mismatch=reset --hook NAME` "
    "makes a job that may",
}
"""Where determinism is strict: no leave to redistribute helps there."""

_TRAINED: Final = (
    "it has done all its steps: `ratchet fork JOB --checkpoint ID` starts a new job from an earlier checkpoint, of those that "
    "`ratchet checkpoints ls JOB` shows"
)


def hint(error: RatchetError, job: str | None) -> str | None:
    """A line for below the error, or None where the error says it already. ``job``: as it was named on the command line."""
    detail = error.detail
    text = (_STRICT if "determinism is strict" in detail else _NEXT).get(error.code)
    if any(e.code == "not-a-directory" and e.pointer.endswith("/code/path") for e in error.errors):
        return "is it a directory of this machine, and the service on another one? `--upload` sends it"
    if any(e.code == "no-snapshot" for e in error.errors):
        return None  # it says what to do, and no key is wrong
    if error.code == "job-ended" and "(SUCCEEDED)" in detail:
        text = _TRAINED
    if text is None or "`ratchet " in detail:  # which names a command itself
        return None
    return text if job is None else text.replace("JOB", job)
