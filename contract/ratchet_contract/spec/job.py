"""The job spec: what a user may specify for a job. ``spec.parse`` turns a user's JSON or YAML data into a ``JobSpec``."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from ratchet_contract.code.tree import DIGEST
from ratchet_contract.env_vars import RESERVED_NAMES, RESERVED_PREFIXES
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_contract.spec.environment import EnvironmentSpec
from ratchet_contract.spec.git_commit import GitFacts
from ratchet_contract.spec.launcher import LauncherSpec, LocalLauncherSpec, VolumeSpec
from ratchet_contract.spec.masking import MASK
from ratchet_contract.spec.policy import PolicySpec
from ratchet_contract.spec.tracking import TrackerName, TrackingSpec
from ratchet_contract.spec.trial import TrialSpec
from ratchet_contract.spec.types import Seconds, Size, SpecModel, size_in_bytes
from ratchet_hooks.specs.hook_specs import AllreduceSpec, HookSpec, normalise_hook

_NAME = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"
_ENTRYPOINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_./]{0,61}[A-Za-z0-9])?")
_MAX_STRING = 128 * 1024 - 1
"""Maximum number of bytes of one argument, or of ``NAME=value``, in Linux (MAX_ARG_STRLEN, whose last byte is a NUL)."""


def _byte_length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


JsonValue = Any


def _env_name(name: str) -> str:
    """Return ``name``. Raises ``ValueError`` if it is not a variable name, or is reserved for the agent."""
    if not _ENV_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a variable name")
    if name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES):
        raise ValueError(f"{name} is set by the agent and cannot be set in a spec")
    return name


def _env_value(value: str) -> str:
    if "\0" in value:
        raise ValueError("the value has a NUL character")
    return value


def _nccl_name(name: str) -> str:
    if not name.startswith("NCCL_") or not _ENV_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not an NCCL_* variable")
    return name


def _label_key(key: str) -> str:
    if not _LABEL.fullmatch(key):
        raise ValueError(f"label key {key!r} must be 1 to 63 letters, digits, '-', '_', '.', '/'")
    return key


def _label_value(value: str) -> str:
    if len(value) > 255:
        raise ValueError("the value of a label has 255 characters at most")
    return value


EnvName = Annotated[str, AfterValidator(_env_name)]


class TaskSpec(SpecModel):
    """A task class and its arguments; Ratchet runs the loop."""

    entrypoint: str = Field(
        description="module:attribute. The module is found in the snapshot of `code` or on the interpreter's path."
    )
    args: dict[str, JsonValue] = Field({}, description="Keyword arguments of the task, JSON values.")

    @field_validator("entrypoint")
    @classmethod
    def _syntax(cls, value: str) -> str:
        """Raise ``ValueError`` if the entrypoint is not like ``package.module:ClassName``."""
        if not _ENTRYPOINT.fullmatch(value):
            module, _, name = value.rpartition(".")
            likely = f"{module}:{name if name != 'py' else 'ClassName'}" if module and ":" not in value else ""
            hint = f"; did you mean {likely!r}?" if _ENTRYPOINT.fullmatch(likely) else ""
            raise ValueError(f"entrypoint must look like 'package.module:ClassName', not {value!r}{hint}")
        return value


class CodeSpec(SpecModel):
    path: str = Field(
        min_length=1,
        description="A directory on the service's machine. Ratchet copies it at submission, and stores the copy under "
        "its digest. For code that is elsewhere, see source and digest.",
    )
    source: Literal["snapshot", "nodes"] = Field(
        "snapshot",
        description="snapshot: path is copied at submission. nodes: path is a directory that every node has (in the "
        "image, or on a volume), and is used in place. Each attempt then computes the digest of the directory, and "
        "the resume report shows a change.",
    )
    digest: str | None = Field(
        None,
        pattern=DIGEST,
        description="Digest of a directory that was uploaded to the service; `ratchet submit FILE --upload` sets it. "
        "path then only records the directory's origin. Not allowed together with source nodes.",
    )
    include: list[str] = Field(
        [],
        max_length=100,
        description="Files and directories below path that the snapshot includes although .gitignore or .ratchetignore names "
        "them.",
    )
    git: GitFacts | None = Field(
        None,
        description="The git commit of the snapshot. null: path is in no git repository. Ratchet sets this key itself; "
        "only together with digest it uses the spec's value, since only the uploader knows the commit.",
    )


class StartSpec(SpecModel):
    """A model that another program saved, from which the job starts while it has no checkpoint."""

    path: str = Field(
        min_length=1,
        description="A file on the service's machine, copied by digest at submission: NAME.safetensors, or a PyTorch checkpoint "
        "that torch.load accepts with "
        "weights_only=True: a state_dict, or one under state_dict, model_state_dict, model or module.",
    )
    optimizer: bool = Field(
        False,
        description="Also load the optimizer's state, from the file's optimizer or optimizer_state_dict. A file "
        "without it is refused.",
    )


class SecretKey(SpecModel):
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", description="Name of the Secret.")
    key: str = Field(pattern=r"^[-._A-Za-z0-9]{1,253}$", description="Key in the Secret.")


class SecretSpec(SpecModel):
    from_env: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Name of a variable in the launcher's environment. Its value is never stored or shown. Variables "
        "with credentials of Ratchet or of the database are refused.",
    )
    from_secret: SecretKey | None = Field(None, description="Kubernetes: a key of a Secret in the job's namespace.")

    @model_validator(mode="after")
    def _one_source(self) -> SecretSpec:
        """Raise ``ValueError`` unless exactly one of the two sources is set."""
        if (self.from_env is None) == (self.from_secret is None):
            raise ValueError("set exactly one of from_env and from_secret")
        return self


class WorldSpec(SpecModel):
    nodes: int = Field(
        1, ge=1, le=1024, description="Number of machines (pods, Slurm nodes); the local launcher has one."
    )
    ranks_per_node: int = Field(
        1,
        ge=1,
        le=1024,
        description="Training processes per node. One device per rank: on CUDA each rank gets a GPU of its own.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto: CUDA if the machine has a GPU that torch can use (on Slurm and Kubernetes: if resources.gpu "
        "is set), else CPU. auto is decided once per job.",
    )
    interface: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.@-]{1,15}$",
        description="Network interface by which several nodes connect (rendezvous, gloo, NCCL). null: the interface "
        "with the address that the launcher sets for the node (Kubernetes: the pod's), else the interface of the route "
        "to the service.",
    )

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node


class ResourcesSpec(SpecModel):
    cpus_per_rank: int | None = Field(
        None, ge=1, le=1024, description="Threads per rank. On CPU the exact result depends on this number."
    )
    memory: Size | None = Field(
        None,
        description="Memory of each node, like 16Gi. The local launcher allows this key only with device cpu. It "
        "divides the memory equally among the ranks, and limits each process of a rank to the rank's share "
        "(RLIMIT_DATA).",
    )
    open_files: int | None = Field(
        None,
        ge=128,
        le=1_048_576,
        description="Maximum number of open files for each process of a rank (RLIMIT_NOFILE). null: the limit of the "
        "process that starts the rank.",
    )
    gpu: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_./]{0,251}[A-Za-z0-9])?$",
        description="Kind of GPU; each rank gets one. Kubernetes: the resource's name, such as nvidia.com/gpu; Slurm: "
        "the gres type, such as a100, or gpu for any.",
    )


class DdpSpec(SpecModel):
    """Options of torch's DistributedDataParallel, under torch's names. ``backend`` is the backend of the process group."""

    bucket_cap_mb: float | None = Field(
        None, gt=0, le=100_000, allow_inf_nan=False, description="MiB of gradients per bucket; null: torch's default."
    )
    static_graph: bool = Field(
        False, description="Every step uses the same parameters. Not allowed together with find_unused_parameters."
    )
    gradient_as_bucket_view: bool = Field(
        False,
        description="Gradients are views into the buckets, so that no second copy of the gradients is needed. "
        "detach_() fails on such gradients; use zero_grad().",
    )
    find_unused_parameters: bool = Field(
        False,
        description="Needed if some parameters may be unused in a step. This costs a pass over the graph per step.",
    )
    broadcast_buffers: bool = Field(True, description="Rank 0's buffers go to all ranks before each forward pass.")
    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: NCCL on CUDA, else gloo.")


class JobSpec(SpecModel):
    """A whole job. Exactly one of ``task`` and ``script`` is set."""

    name: str = Field(pattern=_NAME, description="RFC 1035 label: lower case, digits, '-', up to 63 characters.")
    task: TaskSpec | None = Field(None, description="A task class; Ratchet runs the loop.")
    script: list[str] | None = Field(None, min_length=1, description="A Python file below `code`, and its arguments.")
    code: CodeSpec | None = Field(None, description="The user's directory, which is on the import path of every rank.")
    start_from: StartSpec | None = Field(
        None, description="A model to start from, instead of the weights that the code initialises."
    )
    python: str | None = Field(
        None,
        description="The user's interpreter or virtual environment, with ratchet-train[worker] installed. null: the "
        "agent's interpreter, which is `python` in an image, else by default the service's own.",
    )
    environment: EnvironmentSpec | None = Field(
        None,
        description="Packages that the job needs beyond those of its interpreter. They are installed once, before the ranks "
        "start, and kept for later attempts. Not on Kubernetes, and not together with image.",
    )
    env: dict[EnvName, Annotated[str, AfterValidator(_env_value)]] = Field(
        {},
        description="Variables of every rank. Their values are stored. They are shown, except those of variables in "
        "secret_env.",
    )
    secret_env: list[str] = Field(
        [],
        max_length=64,
        description="Names of variables in env. The API, the command line and the plan do not show their values. Unlike "
        "the values of secrets, they are stored: in the database and in launch.json.",
    )
    secrets: dict[EnvName, SecretSpec] = Field(
        {}, description="Variables of every rank. Their values are read at launch and never stored."
    )
    world: WorldSpec = WorldSpec()
    resources: ResourcesSpec = ResourcesSpec()
    ddp: DdpSpec = DdpSpec()
    hook: Annotated[HookSpec, Field(discriminator="name"), BeforeValidator(normalise_hook)] = Field(
        AllreduceSpec(),
        description="The communication hook: its name, or name and parameters. Hooks are experimental in torch.",
    )
    nccl: dict[Annotated[str, AfterValidator(_nccl_name)], str] = Field(
        {},
        description="NCCL_* variables. Submission warns if the backend is not NCCL. AWS and GCP already set "
        "NCCL_NSOCKS_PERTHREAD, NCCL_SOCKET_NTHREADS and NCCL_MIN_NCHANNELS: set these three only on your own "
        "clusters.",
    )
    checkpoint: CheckpointSpec = CheckpointSpec()
    policy: PolicySpec = PolicySpec()
    determinism: Literal["strict", "warn", "off"] = Field(
        "warn",
        description="strict: Ratchet refuses everything that cannot be exact. warn: deterministic algorithms, and the "
        "resume report lists everything that is not exact. off: torch's defaults.",
    )
    launcher: LauncherSpec = LocalLauncherSpec()
    image: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="Container image of the ranks, on Kubernetes and Slurm. null: on Kubernetes the image that the "
        "service's launchers file names; on Slurm no container.",
    )
    volumes: list[VolumeSpec] = Field(
        [], max_length=64, description="Volumes that are mounted into the ranks' containers."
    )
    labels: dict[Annotated[str, AfterValidator(_label_key)], Annotated[str, AfterValidator(_label_value)]] = Field(
        {}, max_length=64, description="Labels for people and filters; can be changed later."
    )
    priority: int = Field(
        0,
        ge=-1000,
        le=1000,
        description="Jobs with a higher priority start first. If such a job finds no free slots, a job of lower "
        "priority may be stopped: it saves a checkpoint first, and continues later. Jobs with policy.preemptible: "
        "false are not stopped.",
    )
    seed: int = Field(
        0,
        ge=0,
        le=2**63 - 1,
        description="Seed for every random generator, for the order of the data and for augmentation.",
    )
    ttl: Seconds | None = Field(
        None,
        description="Time from the end of the job until the job, its logs and its checkpoints are deleted, at most ten minutes "
        "later.",
    )
    ttl_outputs: bool = Field(
        False,
        description="true: when `ttl` deletes the job, the files in its working directory are deleted too. false: "
        "these files stay.",
    )
    tracking: TrackingSpec = TrackingSpec()
    trial: TrialSpec | None = Field(
        None,
        description="Ends the job early and injects faults; `ratchet prove` uses it. Not for jobs whose result is "
        "needed.",
    )

    @field_validator("env", "nccl", mode="before")
    @classmethod
    def _stringify(cls, value: Any) -> Any:
        """Convert the numbers among the values of ``env`` and ``nccl`` to text; booleans are left as they are."""
        if isinstance(value, dict):
            return {
                k: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in value.items()
            }
        return value

    @field_validator("env")
    @classmethod
    def _lengths(cls, value: dict[str, str]) -> dict[str, str]:
        """Raise ``ValueError`` if a ``NAME=value`` of ``env`` is longer than Linux allows for a process (128 KiB)."""
        if long := [name for name, text in value.items() if _byte_length(name) + 1 + _byte_length(text) > _MAX_STRING]:
            raise ValueError(
                f"the value of {', '.join(long)} is longer than the operating system allows for a process: put it into a file"
            )
        return value

    @field_validator("script")
    @classmethod
    def _arguments(cls, value: list[str] | None) -> list[str] | None:
        """Raise ``ValueError`` if an item of ``script`` has a NUL character or is too long for a process."""
        for i, argument in enumerate(value or ()):
            if "\0" in argument or _byte_length(argument) > _MAX_STRING:
                raise ValueError(
                    f"argument {i} has a NUL character or is longer than the operating system allows for a process"
                )
        return value

    @model_validator(mode="after")
    def _one_of(self) -> JobSpec:
        """Raise ``ValueError`` unless exactly one of ``task`` and ``script`` is set."""
        if (self.task is None) == (self.script is None):
            found = "neither is given" if self.task is None else "both are set: remove one"
            raise ValueError(
                "set exactly one of task (entrypoint and args) and script (a Python file with its arguments); " + found
            )
        return self

    @model_validator(mode="after")
    def _copies_in_memory(self) -> JobSpec:
        """Raise ``ValueError`` for copies in memory of a job with several nodes."""
        if self.checkpoint.memory_every_steps is not None and self.world.nodes > 1:
            raise ValueError(
                f"checkpoint.memory_every_steps is only for jobs of one node, and world.nodes is {self.world.nodes}: remove "
                "it, or set world.nodes to 1"
            )
        return self

    @model_validator(mode="after")
    def _secret_env(self) -> JobSpec:
        """Raise ``ValueError`` if a name in ``secret_env`` is not in ``env``, or its value there is the API's mask."""
        absent = [repr(name) for name in self.secret_env if name not in self.env]
        if absent:
            raise ValueError(f"secret_env names variables that are not in env: {', '.join(absent)}")
        masked = [name for name in self.secret_env if self.env[name] == MASK]
        if masked:
            text = f"the value of {', '.join(masked)} in env is the mask of a secret value"
            raise ValueError(f"{text}: give the value itself, as the job was submitted")
        return self

    @property
    def snapshot_code(self) -> CodeSpec | None:
        """The code whose snapshot the ranks run; None if there is no code, or it is on the nodes."""
        return None if self.code is None or self.code.source == "nodes" else self.code

    @property
    def memory_per_rank(self) -> int | None:
        """Memory limit in bytes of each process of a rank under the local launcher; None: no limit, or another launcher."""
        if self.launcher.kind != "local" or self.resources.memory is None:
            return None
        return size_in_bytes(self.resources.memory) // self.world.ranks_per_node

    def digest(self) -> str:
        """Return the SHA-256 in hex of ``canonical()`` as JSON."""
        return hashlib.sha256(json.dumps(self.canonical(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def canonical(self) -> dict[str, Any]:
        """Return the spec as JSON values, without secret values and without many keys that do not change the result of
        training."""
        irrelevant = {
            "name",
            "labels",
            "priority",
            "ttl",
            "ttl_outputs",
            "policy",
            "launcher",
            "secrets",
            "checkpoint",
            "tracking",
            "trial",
        }
        data = self.model_dump(mode="json", exclude=irrelevant)
        for key in ("start_from", "environment"):  # an optional key that is not given leaves the digest as it is
            if data[key] is None:
                del data[key]
        # A secret must not be found by trying values until the digest fits; and a new value of a secret changes no result.
        data["env"] = {name: value for name, value in self.env.items() if name not in self.secret_env}
        del data["secret_env"]
        data["resources"] |= {"memory": None, "gpu": None}  # where the job runs, not what is computed
        del data["resources"]["open_files"]
        del data["world"]["interface"], data["image"], data["volumes"]
        if self.code is not None and self.code.source == "snapshot":
            del data["code"]["source"]
        if self.code is not None:
            del data["code"]["include"], data["code"]["git"]  # covered by the code's own digest
        if self.code is not None and self.code.digest is None:
            del data["code"]["digest"]
        return data


class Resolved(SpecModel):
    """Values that are determined when a job is submitted, such as the ``device`` for a spec with ``auto``. They hold for all
    attempts of the job, with two exceptions: a resume with another number of ranks may change ``threads_per_rank``, and a resume
    with other code may change ``code_digest``. ``python``: the interpreter that was examined at submission; if the spec names
    none, each attempt uses the interpreter of its agents. ``trackers``: those that get the job's metrics. Unknown keys are
    ignored."""

    model_config = ConfigDict(extra="ignore")

    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    threads_per_rank: int
    python: str
    code_digest: str | None = None
    start_digest: str | None = None
    trackers: list[TrackerName] = Field([])
