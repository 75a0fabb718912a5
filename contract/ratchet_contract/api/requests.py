"""Request bodies of a job's actions. The body of a submission is the job spec itself (``ratchet_contract.spec``)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from ratchet_contract.api.views import View
from ratchet_contract.code.tree import DIGEST
from ratchet_contract.spec.git_commit import GitFacts


class WorldChange(View):
    """Another number of ranks for later attempts."""

    model_config = ConfigDict(extra="forbid")

    ranks_per_node: int = Field(ge=1, le=1024)
    nodes: int | None = Field(None, ge=1, le=1024, description="null: as many as the job has.")


class CodeChange(View):
    """Other code for later attempts, as in the spec's ``code``."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, description="A directory on the service's machine; a new snapshot is taken of it.")
    digest: str | None = Field(
        None,
        pattern=DIGEST,
        description="Digest of an uploaded directory; path then only records its origin.",
    )
    git: GitFacts | None = Field(None, description="With digest: which git commit it was taken at.")
    include: list[str] | None = Field(None, description="As in the spec's code; null: unchanged.")


class ResumeRequest(View):
    model_config = ConfigDict(extra="forbid")

    from_step: int | None = Field(None, ge=0, description="Step of a committed checkpoint of this job's lineage.")
    world: WorldChange | None = Field(
        None,
        description="Continue with another number of ranks. Not exact: policy.on_hook_mismatch must allow it if hook state "
        "or data position would be lost, and the resume report lists what was "
        "redistributed. Threads per rank are decided again.",
    )
    code: CodeChange | None = Field(
        None,
        description="Continue with other code, of which a new snapshot is "
        "taken. Not exact, unless no file has changed: the resume "
        "report names both digests.",
    )
    hook: dict[str, Any] | str | None = Field(
        None,
        description="Continue with another hook, wrapper or parameters: merged over the job's hook (RFC 7396), or replacing "
        "it if the name differs. A name alone stands for a mapping with that name: the job's own keeps its parameters, "
        "and null gives one of them its default. policy.on_hook_mismatch must allow the recorded "
        "state to be carried over or reset, and the resume report lists what was carried over.",
    )
    on_hook_mismatch: Literal["fail", "reset", "redistribute"] | None = Field(
        None, description="The job's new policy.on_hook_mismatch; null: unchanged."
    )

    @field_validator("hook", mode="before")
    @classmethod
    def _name_or_mapping(cls, value: Any) -> Any:
        """Return ``value`` unchanged. Raise ``ValueError`` if it is neither None nor a name nor a mapping."""
        if value is None or isinstance(value, str | dict):
            return value
        raise ValueError("a hook must be a name, or a mapping of its parameters")


class ForkRequest(View):
    model_config = ConfigDict(extra="forbid")

    checkpoint_id: str | None = Field(None, description="Default: the newest committed one.")
    name: str | None = None
    spec: dict[str, Any] = Field({}, description="Merged over the parent's spec, key by key (RFC 7396).")


class PatchRequest(View):
    model_config = ConfigDict(extra="forbid")

    labels: dict[str, str | None] | None = Field(None, description="null removes a label.")
    priority: int | None = Field(None, ge=-1000, le=1000)


class PinRequest(View):
    model_config = ConfigDict(extra="forbid")

    pinned: bool = True


class PruneRequest(View):
    model_config = ConfigDict(extra="forbid")

    dry_run: bool = Field(False, description="Only report what would be removed.")
    quarantined: bool = Field(False, description="Also remove damaged checkpoints in the quarantine.")
