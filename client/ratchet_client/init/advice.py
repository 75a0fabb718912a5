"""Derives notes for the user, and some settings of the spec, from the facts about a script."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Literal

from ratchet_client.init import lightning_devices
from ratchet_client.init.command_line import Command
from ratchet_client.init.project import LARGE, MANY, Place, entries, missing_modules
from ratchet_client.init.script_facts import Facts, HookUse
from ratchet_client.init.script_facts import Place as Where
from ratchet_contract.plural import pluralize
from ratchet_contract.script.public_names import PACKAGE, requirement
from ratchet_contract.script.unmanaged_script import is_unmanaged
from ratchet_hooks.specs.hook_specs import canonical_hook_name
from ratchet_hooks.specs.registry import HOOKS

Way = Literal["unmanaged", "session", "task"]
_GUIDE: Final = "docs/adoption.md"
_LOGGING: Final = "docs/own-logging.md"


@dataclass(frozen=True)
class Note:
    """A note for the user. ``code``: a stable identifier. ``serious``: the user must attend to it."""

    code: str
    text: str
    serious: bool = False


def run_mode(facts: Facts, place: Place) -> Way:
    """Return how Ratchet runs the script: "session", "task" or "unmanaged"."""
    if facts.session is not None:
        return "session"
    if facts.task is not None and facts.ddp is None:
        return "task"
    return "unmanaged" if is_unmanaged(place.script.read_bytes()) else "session"


def device_of(command: Command, facts: Facts) -> Literal["auto", "cpu", "cuda"]:
    """Return the device that the command specifies; if that is "auto", the device that the script's backend implies, if any."""
    names = {where.value for where in facts.backends}
    if command.device != "auto" or len(names) != 1:
        return command.device
    if names == {"nccl"}:
        return "cuda"
    return "cpu" if names == {"gloo"} and not facts.cuda else "auto"


def hook_block(hook: HookUse) -> dict[str, Any] | None:
    """Return the value of the spec's key ``hook`` for the script's ``hook``; None if Ratchet does not offer it."""
    name = canonical_hook_name(hook.name)
    return {"name": name, **hook.parameters} if name in HOOKS and HOOKS[name].available else None


def notes(command: Command, facts: Facts, place: Place, python: Path | None) -> list[Note]:
    """Return all notes about the script. Runs the job's interpreter, which may block for a minute. ``python``: as for
    ``_surroundings``."""
    way = run_mode(facts, place)
    return [
        *_way(facts, place, way), *_frameworks(command, facts, way), *_hooks(facts, way), *_saves(facts, way),
        *tracker_notes(facts), *_start(facts, way), *_paths(command, facts, place), *_arguments(command, facts, way),
        *_surroundings(facts, place, python),
    ]  # fmt: skip


def _way(facts: Facts, place: Place, way: Way) -> Iterator[Note]:
    """Yield the notes on how Ratchet runs the script, and on a Session that may not be found."""
    if way == "task":
        assert facts.task is not None
        yield Note(
            "task",
            f"{place.relative} has the task {facts.task[0]}: Ratchet runs the loop, saves and resumes bit for bit",
        )
    elif way == "unmanaged":
        yield Note(
            "unmanaged",
            f"{place.relative} uses no Session, it is unmanaged: Ratchet starts it, and after a failure starts it again from its "
            f'first line; the resume report says "unmanaged". {_change(facts, place)}',
        )
    elif facts.session is not None:
        yield Note("session", f"a Session ({facts.session}): Ratchet saves and resumes what is registered, bit for bit")
        if is_unmanaged(place.script.read_bytes()):
            text = f"the Session is made in {facts.session.file}: import ratchet_worker in {place.relative} too, to make it known"
            yield Note("session-elsewhere", text, serious=True)
    elif facts.lightning_cli is not None:
        where = "by --trainer.strategy ratchet, or `strategy: ratchet` below `trainer` in its YAML file"
        yield Note("session", f"{facts.lightning_cli} makes a Session where its strategy is `ratchet`: {where}")
    else:
        named = f"{place.relative} names Ratchet's Session or ratchet_worker"
        text = f"{named} and so counts as managed, but no Session is made: make one ({_GUIDE})"
        yield Note("no-session", text, serious=True)
    if facts.is_partial:
        read = pluralize(len(facts.files), "file")
        text = f"read only {read} of the script and its modules: a Session in another one is not known"
        yield Note("files-left-out", text, serious=facts.lacks_own and facts.session is None)


def training_place(facts: Facts) -> Where | None:
    """Return the place of the script's DDP call, else of a framework that it uses; None if there is neither. The file at this
    place is the one that ``ratchet init --patch`` may change."""
    found = [facts.ddp, *(one.place for one in facts.frameworks)]
    return next((at for at in found if at is not None), None)


def _change(facts: Facts, place: Place) -> str:
    """Return a sentence on how to make an unmanaged script resume bit for bit."""
    there = training_place(facts)
    if there is None:
        return f"The steps from here to bit for bit: {_GUIDE}"
    path = os.path.relpath(place.code / there.file)
    return f"The change from here to bit for bit: ratchet init --patch {shlex.quote(path)}; the proof: ratchet prove ({_GUIDE})"


def _frameworks(command: Command, facts: Facts, way: Way) -> Iterator[Note]:
    """Yield notes on frameworks that run the training of an unmanaged script, and on a number of devices that is
    unknown or does not fit."""
    if way != "unmanaged":
        return
    for one in {one.name: one for one in facts.frameworks}.values():
        own = (
            "; it writes checkpoints of its own, and resumes from them only if the script does so" if one.saves else ""
        )
        yield Note("framework", f"{one.name} ({one.place}) runs the training{own}")
    trainer = lightning_devices.lightning(facts)
    if trainer is not None:
        count = lightning_devices.device_count(command, facts, trainer)
        shown = "" if trainer.devices is None else f"={trainer.devices}"
        if command.given is None and count is None:
            text = f"the number of devices{shown} is unknown ({trainer.place}): set --nproc-per-node to it"
            yield Note("devices", text, serious=True)
        elif count is not None and count != command.ranks:
            text = f"devices{shown} in {trainer.place}, but {pluralize(command.ranks, 'rank')}: Lightning fails if they differ"
            yield Note("devices", text, serious=True)


def _hooks(facts: Facts, way: Way) -> Iterator[Note]:
    """Yield notes on the hooks that the script registers, such as whether a hook's state survives a restart."""
    for hook in facts.hooks:
        name, at = hook.name, f"{hook.place.file}, line {hook.place.line}"
        entry = HOOKS.get(canonical_hook_name(name))
        stateless = entry is not None and not entry.stateful
        if facts.managed is not None and way == "unmanaged":
            yield Note("hook", f"{name} through ratchet_hooks ({at}): its state is in the script's own checkpoints")
        elif way != "unmanaged":
            known = hook_block(hook) is not None
            done = "the hook is set in the spec now" if known else "set `hook` in the spec (docs/hooks.md)"
            yield Note("hook", f"{name} is registered in {at}: {done}, remove that line", serious=True)
        elif stateless:
            yield Note("hook", f"{name} ({at}) keeps no state: nothing of it is lost at a restart")
        else:
            own = "" if entry is not None else "a hook of your own: "
            yield Note(
                "hook-state",
                f"{own}{name} is registered in {at}; its state is lost at each restart, so that a restarted run ends in other "
                f"weights. ratchet_hooks, a Session or a Task keep it ({_GUIDE})",
                serious=True,
            )
        for parameter, source in hook.open.items():
            yield Note("hook-parameter", f"{parameter} of {name} is {source} in {at}: fill it in where the hook is set")


def _saves(facts: Facts, way: Way) -> Iterator[Note]:
    """Yield notes on the checkpoints that the script writes, or a serious one if none is found for an unmanaged script."""
    for save in facts.saves:
        target = f'"{save.value}"' if save.value else "a path computed at run time"
        if way == "unmanaged":
            text = f"it saves to {target} ({save}); a restart continues from there only if the script does so itself"
        else:
            text = f"it saves to {target} ({save}); the job continues from Ratchet's checkpoints, not from this file"
        yield Note("saves", text)
    if way == "unmanaged" and not facts.saves and not any(one.saves for one in facts.frameworks):
        yield Note(
            "saves-nothing",
            "found no checkpoint of its own: each restart would begin at the first step",
            serious=True,
        )


def tracker_notes(facts: Facts) -> Iterator[Note]:
    """Yield a note for each call of a tracker that would log repeated steps twice, or begin another run at a restart."""
    for place in facts.trackers:
        yield Note("tracker", f"{place.text.partition('(')[0]} in {place}: {place.value} ({_LOGGING})", serious=True)


def _start(facts: Facts, way: Way) -> Iterator[Note]:
    """Yield notes on how the script starts: ranks that it starts itself, process group, GPU use, and the option
    ``--local-rank``."""
    if facts.spawn is not None:
        yield Note(
            "spawn",
            f"{facts.spawn}: it starts its ranks itself ({facts.spawn.text.split('(')[0]}), where Ratchet and torchrun start "
            "them: call the function once, with RANK and WORLD_SIZE of the environment, and give --nproc-per-node",
            serious=True,
        )
    for backend in facts.backends if way != "unmanaged" else ():
        yield Note(
            "backend", f"{backend}: remove init_process_group, the group is there already (ddp.backend)", serious=True
        )
    for use in facts.cuda:
        if use.value is not None and re.fullmatch(r"cuda:\d+", use.value):
            text = f'"{use.value}" in {use}: every rank would take the same GPU; use int(os.environ["LOCAL_RANK"])'
            yield Note("device", text, serious=True)
        else:
            yield Note(
                "cuda", f"{use.text} in {use}: it needs a GPU, and its rank's own (torch.cuda.set_device(local_rank))"
            )
    for option in facts.options:
        if set(option.flags) & {"--local_rank", "--local-rank"}:
            text = 'no launcher passes --local-rank any more, not even torchrun: read int(os.environ["LOCAL_RANK"])'
            yield Note("local-rank", text, serious=option.required)


def _paths(command: Command, facts: Facts, place: Place) -> Iterator[Note]:
    """Yield notes on relative paths that the script writes, and on those that it reads or gets as arguments but may not
    find."""
    written = sorted({str(where.value) for where in facts.writes if _is_relative_path(where)})
    if written:
        names = ", ".join(f'"{name}"' for name in written)
        yield Note(
            "writes", f"it writes to {names}: in the job's own working directory, which is kept across its attempts"
        )
    for read in facts.reads:
        if _is_relative_path(read) and read.value not in written and not (place.code / str(read.value)).exists():
            text = f'it reads "{read.value}" ({read}), which is not below {place.code}: give an absolute path, or another --code'
            yield Note("reads", text, serious=True)
    here = Path.cwd().resolve()
    for argument in command.arguments:
        value = argument.partition("=")[2] if argument.startswith("-") else argument
        if value and not Path(value).is_absolute() and (here / value).exists() and here != place.code:
            text = f"the argument {argument} is a path from {here}, but ranks start in a copy of {place.code}: "
            cure = "give --code ." if (here / value).resolve().is_relative_to(here) else "make it absolute"
            yield Note("argument-path", text + cure, serious=True)


def _is_relative_path(where: Where) -> bool:
    return bool(where.value) and not Path(str(where.value)).is_absolute() and "://" not in str(where.value)


def _arguments(command: Command, facts: Facts, way: Way) -> Iterator[Note]:
    """Yield serious notes on options that the script requires and the command lacks. Required positional arguments get a note
    only if the command has no arguments at all. Yield nothing for a task."""
    words = takewhile(lambda word: word != "--", command.arguments)
    flags = [word.partition("=")[0] for word in words if word.startswith("-") and word != "-"]
    lacking = [
        option.flags[-1]
        for option in facts.options
        if option.required and option.flags[0].startswith("-")
        and not any(_is_given(flag, given) for flag in option.flags for given in flags)
    ]  # fmt: skip
    if way != "task" and lacking:
        text = f"the script needs {', '.join(lacking)}, which is not among its arguments: add it after the script"
        yield Note("argument-missing", text, serious=True)
    needed = [option.flags[0] for option in facts.options if option.required and not option.flags[0].startswith("-")]
    if way != "task" and needed and not command.arguments:
        yield Note("argument-missing", f"the script needs the argument {', '.join(needed)}", serious=True)


def _is_given(flag: str, word: str) -> bool:
    """Return True if argparse may take ``word`` for the option ``flag``: abbreviated, or with the value after a short one."""
    return flag.startswith(word) or (len(flag) == 2 and word.startswith(flag))


def _surroundings(facts: Facts, place: Place, python: Path | None) -> Iterator[Note]:
    """Yield notes on modules that the job's interpreter lacks, and on a large code directory. ``python``: the interpreter or
    environment; None: that of this command."""
    missing = missing_modules(python, facts.modules | {"ratchet_worker", "torch"}, [place.script.parent, place.code])
    who, ours = python or "the interpreter that runs this command", {PACKAGE, "ratchet_worker"}
    if missing is None:
        yield Note("python", f"{who} did not report which modules it has", serious=True)
    elif ours & set(missing):
        text = f"{who} needs Ratchet's worker of this version: pip install '{requirement(PACKAGE)}' there"
        yield Note("module-missing", text, serious=True)
    others = [name for name in missing or () if name not in ours]
    cure = "install it, or name another by python:"
    if (place.code / "requirements.txt").is_file():
        cure = "environment: {requirements: requirements.txt} in the spec installs it for the job; or " + cure
    if certain := [name for name in others if name not in facts.perhaps]:
        yield Note("module-missing", f"{who} has no module {', '.join(certain)}: {cure}", serious=True)
    if perhaps := [name for name in others if name in facts.perhaps]:
        named = f"{', '.join(perhaps)}, imported within a function or a condition"
        yield Note("module-perhaps-missing", f"{who} has no module {named}: {cure}, if the script needs it")
    yield from _large(place.code)


def _large(code: Path) -> Iterator[Note]:
    """Yield a serious note if a snapshot of ``code`` would have more than ``LARGE`` bytes or ``MANY`` files."""
    found = entries(code)
    size, count = sum(entry.size for entry in found), sum(entry.count for entry in found)
    if size <= LARGE and count <= MANY:
        return
    by_size = sorted((e for e in found if e.size > LARGE // 20), key=lambda e: -e.size)
    by_count = sorted((e for e in found if e.count > MANY // 20), key=lambda e: -e.count)
    named = [f"{e.name} {e.size / 1e6:.0f} MB" for e in by_size[:5]] if size > LARGE else []
    named += [f"{e.name} {pluralize(e.count, 'file')}" for e in by_count[:5]] if count > MANY else []
    text = f"{code} holds at least {size / 1e6:.0f} MB in {pluralize(count, 'file')} ({', '.join(named)})"
    yield Note(
        "large", f"{text}, all copied at submission: keep data elsewhere, or name it in .ratchetignore", serious=True
    )
