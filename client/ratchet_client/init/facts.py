"""What is known of a script once it has been read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Place:
    """A line of a file, and what stands there. ``value`` is None where it is not a literal."""

    file: str
    line: int
    text: str
    value: str | None = None

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass(frozen=True)
class HookUse:
    """A registered communication hook. ``name`` as in the script; ``parameters``: those that stand there as literals, ``open``:
    those that do not, with their source text."""

    place: Place
    name: str
    parameters: dict[str, Any]
    open: dict[str, str]


@dataclass(frozen=True)
class Option:
    """One ``add_argument``: flags, or the name of a positional argument."""

    flags: tuple[str, ...]
    required: bool
    default: str | None = None

    @property
    def name(self) -> str:
        """Of its attribute, unless ``dest`` says another."""
        return next((f for f in self.flags if f.startswith("--")), self.flags[0]).lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Framework:
    """What runs the training loop, or a part of it. ``devices``: of Lightning's Trainer, as the script says it; ``cpu``: it is
    told to use no GPU. ``saves``: it writes checkpoints of its own unless it is told otherwise."""

    name: Literal["Lightning's Trainer", "the Trainer of transformers", "Accelerate"]
    place: Place
    devices: str | None = None
    cpu: bool = False
    saves: bool = False


@dataclass
class Facts:
    """Of the script and the local modules it imports. ``modules``: top-level names of everything else that it needs;
    ``perhaps``: those of them that only a function or a condition imports."""

    session: Place | None = None
    task: tuple[str, tuple[str, ...]] | None = None  # class, constructor's parameters
    managed: Place | None = None  # ratchet_hooks.managed_ddp
    ddp: Place | None = None
    spawn: Place | None = None
    lightning_cli: Place | None = None
    frameworks: list[Framework] = field(default_factory=list)
    hooks: list[HookUse] = field(default_factory=list)
    saves: list[Place] = field(default_factory=list)
    writes: list[Place] = field(default_factory=list)
    reads: list[Place] = field(default_factory=list)
    backends: list[Place] = field(default_factory=list)
    cuda: list[Place] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    perhaps: set[str] = field(default_factory=set)
    files: list[Path] = field(default_factory=list)
