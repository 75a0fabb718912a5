"""The facts about a script after it has been read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Place:
    """A place in a script. ``text``: the source text of an expression there. ``value``: the path or string that the expression
    stands for, for example the file that it opens. If only the beginning of the path or string is a literal, as in an f-string,
    ``value`` is this beginning; if not even that is a literal, None."""

    file: str
    line: int
    text: str
    value: str | None = None

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass(frozen=True)
class HookUse:
    """A communication hook that the script registers. ``name``: that of its Python function, and for ``managed_ddp`` Ratchet's
    name, or a text with the source of an unknown spec. ``parameters``: its arguments that are literals; ``open``: the others,
    with their source text."""

    place: Place
    name: str
    parameters: dict[str, Any]
    open: dict[str, str]


@dataclass(frozen=True)
class Option:
    """An ``add_argument`` call of the script. ``flags``: the option's names, or the one name of a positional argument.
    ``default``: the default as text; None if there is none or it is not a single constant."""

    flags: tuple[str, ...]
    required: bool
    default: str | None = None

    @property
    def name(self) -> str:
        """The name of the attribute in which argparse stores the value, unless the script sets ``dest``."""
        return next((f for f in self.flags if f.startswith("--")), self.flags[0]).lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Framework:
    """A use of a framework that runs the training loop, or a part of it. ``devices``: source text of the ``devices`` argument of
    Lightning's Trainer, None if absent. ``cpu``: the ``accelerator`` of Lightning's Trainer is "cpu". ``saves``: a Trainer that
    writes checkpoints of its own, which the script does not disable; False for Accelerate."""

    name: Literal["Lightning's Trainer", "the Trainer of transformers", "Accelerate"]
    place: Place
    devices: str | None = None
    cpu: bool = False
    saves: bool = False


@dataclass
class Facts:
    """The facts that ``read_script`` finds about a script and the local modules that it imports.

    ``session``, ``managed`` (``managed_ddp`` of ``ratchet_hooks``), ``ddp``, ``spawn``, ``lightning_cli``: the first place that
    uses it; None if there is none. ``task``: the name of the task's class and the parameters of its constructor; None if there is
    no task. ``frameworks``, ``hooks``, ``options``: what the script uses, registers and declares of these.

    Lists of places: ``saves``: where checkpoints are written; ``writes``, ``reads``: where files or directories are written or
    read; ``backends``: the calls of ``init_process_group``, with the backend as ``value`` (None: not given as a literal);
    ``cuda``: the calls ``x.cuda()`` and strings like ``"cuda:0"``. ``modules``: the top-level names of all other modules that are
    needed; ``perhaps``: those of them that are imported only in a function or under a condition. ``files``: the files that were
    read. ``is_partial``: other files were not read, since there are too many or they cannot be read. ``lacks_own``: one of them
    is directly in the script's directory.
    """

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
    is_partial: bool = False
    lacks_own: bool = False
