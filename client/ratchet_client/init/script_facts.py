"""The facts about a script after it has been read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Place:
    """A place in a script. ``text``: the source of the expression there. ``value``: the text that matters at this place, such as
    a path, or only the beginning of this text; None: unknown."""

    file: str
    line: int
    text: str
    value: str | None = None

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass(frozen=True)
class HookUse:
    """A communication hook that the script registers. ``parameters``: the arguments that are literals; ``open``: the source text
    of the others."""

    place: Place
    name: str
    parameters: dict[str, Any]
    open: dict[str, str]


@dataclass(frozen=True)
class Option:
    """An ``add_argument`` call of the script. ``default``: None if there is none or it is not a constant."""

    flags: tuple[str, ...]
    required: bool
    default: str | None = None

    @property
    def name(self) -> str:
        """The name of the attribute in which argparse stores the value, unless the script sets ``dest``."""
        return next((f for f in self.flags if f.startswith("--")), self.flags[0]).lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Framework:
    """A use of a training framework. ``devices``: the source text of the argument ``devices`` of Lightning's Trainer. ``cpu``:
    the Trainer's accelerator is "cpu". ``saves``: the framework's Trainer writes checkpoints itself."""

    name: Literal["Lightning's Trainer", "the Trainer of transformers", "Accelerate"]
    place: Place
    devices: str | None = None
    cpu: bool = False
    saves: bool = False


@dataclass
class Facts:
    """The facts that ``read_script`` finds in a script and the local modules that it imports. ``session``, ``managed``, ``ddp``,
    ``spawn``, ``lightning_cli``: the first place where it is used; None: it is not used. ``trackers``: calls that would log
    repeated steps twice, or begin another run at a restart, with a sentence as ``value``. ``modules``: the top-level modules that
    are imported and not local, without optional imports. ``perhaps``: those of ``modules`` that are imported only within other
    statements, and may not be needed. ``is_partial``: some local files were not read, since they could not be or are too
    many. ``lacks_own``: one of these files is directly in the script's directory."""

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
    trackers: list[Place] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    perhaps: set[str] = field(default_factory=set)
    files: list[Path] = field(default_factory=list)
    is_partial: bool = False
    lacks_own: bool = False
