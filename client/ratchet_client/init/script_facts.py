"""The facts about a script after it has been read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Place:
    """A line of a file, and the expression in it. ``value`` is None if it is not a literal."""

    file: str
    line: int
    text: str
    value: str | None = None

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass(frozen=True)
class HookUse:
    """A registered communication hook. ``name`` is that of the script; ``parameters``: those that are literals, ``open``: the
    others, with their source text."""

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
        """The name of its attribute, unless ``dest`` sets another."""
        return next((f for f in self.flags if f.startswith("--")), self.flags[0]).lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Framework:
    """A framework that runs the training loop, or a part of it. ``devices``: of Lightning's Trainer, as in the script; ``cpu``:
    it is configured to use no GPU. ``saves``: it writes checkpoints of its own (the script does not disable that)."""

    name: Literal["Lightning's Trainer", "the Trainer of transformers", "Accelerate"]
    place: Place
    devices: str | None = None
    cpu: bool = False
    saves: bool = False


@dataclass
class Facts:
    """Facts about the script and the local modules that it imports. ``modules``: top-level names of all other modules that it
    needs; ``perhaps``: those of them that only a function or a condition imports."""

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
