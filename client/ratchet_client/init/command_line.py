"""Parses the command that a user trains with (torchrun and its options, ``python train.py``, or only the script)."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from ratchet_client.init.torchrun_options import OPTIONS, Drop, Keep, Refuse
from ratchet_contract.errors import Refused

_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch")
_VARIABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
_OTHERS: Final = {
    "accelerate": "accelerate launch", "deepspeed": "deepspeed", "horovodrun": "horovodrun", "mpirun": "mpirun",
    "mpiexec": "mpiexec", "srun": "srun", "lightning": "lightning run", "composer": "composer", "poetry": "poetry run",
    "uv": "uv run", "conda": "conda run", "nohup": "nohup",
}  # fmt: skip


@dataclass
class Command:
    """A parsed training command. ``ranks``, ``device``: as for the spec's ``world``. ``given``: the option or argument that set
    the number of ranks; None if nothing did. ``python``: the interpreter, if the command names one by a path. ``policy``: values
    for keys of the spec's policy. ``dropped``: options that are not needed, each with the reason."""

    script: str
    arguments: list[str]
    ranks: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    given: str | None = None
    python: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    policy: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)


def parse_command(words: Sequence[str], environ: Mapping[str, str]) -> Command:
    """Parse the training command ``words``, as typed after ``ratchet init``, and return it. ``environ``: environment variables,
    of which those named ``PET_...`` set options of torchrun. Raise ``Refused`` if the command is invalid or unsupported."""
    env, rest = _variables(words)
    if not rest:
        raise Refused(
            "name the script: ratchet init train.py, or ratchet init torchrun --nproc-per-node 4 train.py --lr 0.1"
        )
    first = Path(rest[0]).name
    if first in _OTHERS:
        raise Refused(
            f"{_OTHERS[first]} is not read: give the command that it starts in the end, like torchrun --nproc-per-node 4 "
            "train.py --lr 0.1"
        )
    if first == "torchrun":
        command = _torchrun(rest[1:], environ)
    elif _PYTHON.fullmatch(first):
        command = _from_python(rest[1:], environ)
    else:
        command = _torchrun(rest, environ)
        if command.arguments[:1] == ["--"]:  # ratchet init train.py -- --lr 0.1
            del command.arguments[0]
        rest = []
    command.env, command.python = env, _explicit(rest[0]) if rest else None
    return command


def _variables(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the ``NAME=value`` words before the program as a dict, and the remaining words. Raise ``Refused`` for
    ``CUDA_VISIBLE_DEVICES``."""
    rest = list(words)
    if rest[:1] == ["env"]:
        del rest[0]
    found = {}
    while rest and (match := _VARIABLE.fullmatch(rest[0])):
        found[match[1]] = match[2]
        del rest[0]
    if "CUDA_VISIBLE_DEVICES" in found:
        raise Refused(
            "CUDA_VISIBLE_DEVICES: the service allocates GPUs, each to one job: set it where `ratchet serve` starts"
        )
    return found, rest


def _explicit(word: str) -> Path | None:
    """Return the interpreter for the program ``word``. This is the path ``word`` itself if it names Python, else ``python`` in
    the same directory, as for torchrun. Return None for a word without "/". Raise ``Refused`` if there is no such interpreter."""
    if "/" not in word:
        return None
    path = Path(word).expanduser().absolute()
    python = path if _PYTHON.fullmatch(path.name) else path.with_name("python")
    if not python.is_file():
        raise Refused(f"{word}: there is no interpreter {python}")
    return python


def _from_python(words: list[str], environ: Mapping[str, str]) -> Command:
    """Return the command for the words after ``python``. Raise ``Refused`` for what is invalid or a spec cannot express."""
    rest, dropped = list(words), {}
    while rest and rest[0] == "-u":
        dropped["-u"] = "output of ranks is never buffered"
        del rest[0]
    if rest[:1] == ["-m"] and len(rest) > 1:
        module = rest[1]
        if module not in _LAUNCHERS:
            raise Refused(_module(module))
        command = _torchrun(rest[2:], environ, legacy=module == _LAUNCHERS[1])
    elif rest and rest[0].startswith("-"):
        raise Refused(
            f"{rest[0]} of python cannot be set in a spec: leave it out, or set its PYTHON... variable in front"
        )
    elif not rest:
        raise Refused("name the script: ratchet init python train.py")
    else:
        command = Command(rest[0], rest[1:])
    command.dropped = dropped | command.dropped
    return command


def _module(module: str) -> str:
    """Return the error text for ``-m module``, with how to write a file that runs the module."""
    return (
        f"-m {module}: a spec names a file, no module. Write one next to the package, say run_{module.split('.')[-1]}.py: "
        f'`import runpy; runpy.run_module("{module}", run_name="__main__", alter_sys=True)`, and name that'
    )


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ``Refused`` for an invalid command line instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}; this is read as torchrun reads it (ratchet's own options come first)")


def _torchrun(words: Sequence[str], environ: Mapping[str, str], *, legacy: bool = False) -> Command:
    """Return the command for the words after ``torchrun``. ``legacy``: the launcher is ``torch.distributed.launch``. Raise
    ``Refused`` for options that are invalid or unsupported."""
    # As torchrun does: with abbreviations and ``--a=b``.
    parser = _Parser(prog="torchrun", add_help=False)
    for option in OPTIONS:
        more: dict[str, Any] = {"action": "store_const", "const": ""} if option.switch else {}
        parser.add_argument(*option.flags, dest=option.dest, default=None, **more)
    if legacy:
        parser.add_argument("--use-env", "--use_env", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    # argparse would also look for its options, and abbreviations of them, after a script that comes first.
    first = 1 if words and not words[0].startswith("-") else len(words)
    parsed = parser.parse_args([*words[:first]])
    if legacy and not parsed.use_env:
        raise Refused(
            "torch.distributed.launch gives the script --local-rank: read int(os.environ['LOCAL_RANK']) in the script instead, "
            "and use torchrun"
        )
    command = Command(parsed.script, [*parsed.arguments, *words[first:]])
    for option in OPTIONS:
        value = getattr(parsed, option.dest)
        if value is None:
            value = _from_environment(option.dest, option.switch, environ)
        if value is not None:
            _apply(command, option.name, value, option.rule(value))
    return command


def _from_environment(dest: str, switch: bool, environ: Mapping[str, str]) -> str | None:
    """Return the value of torchrun's option ``dest`` from its variable ``PET_<DEST>``; "" for a ``switch`` that is on; None if
    unset or off."""
    value = environ.get(f"PET_{dest.upper()}")
    return None if value is None or (switch and value == "0") else "" if switch else value


def _apply(command: Command, name: str, value: str, answer: Keep | Drop | Refuse) -> None:
    """Apply the rule's result ``answer`` for the option ``name`` to ``command``. Raise ``Refused`` if the option or its ``value``
    cannot be used."""
    shown = f"{name}={value}" if value else name
    if isinstance(answer, Refuse):
        raise Refused(_module(command.script) if name == "--module" else f"{shown}: {answer.cure}")
    if isinstance(answer, Drop):
        command.dropped[shown] = answer.why
    elif answer.key == "world":
        command.given = shown
        command.ranks, command.device = count_ranks(value)
    else:
        command.policy[answer.key.removeprefix("policy.")] = _number(
            name, value, minimum=int(name == "--shutdown-timeout")
        )


def _number(name: str, value: str, *, minimum: int) -> int:
    """Return ``value`` as an int. Raise ``Refused`` if it is not a whole number of at least ``minimum``; ``name``: for the
    message."""
    if not (value.isascii() and value.isdigit() and int(value) >= minimum):
        raise Refused(f"{name} is a whole number from {minimum}, not {value!r}")
    return int(value)


def count_ranks(value: str) -> tuple[int, Literal["auto", "cpu", "cuda"]]:
    """Return the ranks and the device for the value of ``--nproc-per-node``. May count this machine's GPUs, which may block.
    Raise ``Refused`` for an unusable value."""
    gpus = count_gpus() if value in ("gpu", "auto") else 0
    if value == "gpu" and not gpus:
        raise Refused("--nproc-per-node=gpu: this machine has no GPU; give the number of ranks")
    if gpus:
        return gpus, "cuda"
    if value in ("cpu", "auto"):
        return os.cpu_count() or 1, "cpu"
    if not value.isdigit() and value:
        raise Refused(f"--nproc-per-node={value}: give a number, or auto, cpu or gpu")
    return _number("--nproc-per-node", value, minimum=1), "auto"


def count_gpus() -> int:
    """Return the number of GPUs that ``CUDA_VISIBLE_DEVICES`` lists, or without it the number that ``nvidia-smi`` finds. May
    block for 30 seconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, errors="replace", timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
