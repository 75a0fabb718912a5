"""The jobs of a run: stand-ins without torch, whose state follows from every step in its order, and real ranks under hooks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.support.control_plane import trainer_spec
from tests.support.exact_cells import Cell

HOOKS: Final = ("powerSGD", "fp16_compress", "post_localSGD", "quantization_pertensor", "allreduce")
STEP_DEADLINE: Final = 4.0
"""Seconds; ranks are stopped for longer than that."""
_STAND_INS: Final = {"short": (90, 10), "long": (150, 25), "pair": (90, 15)}
"""Steps, and steps between saves; the last has two ranks."""
_PRIORITIES: Final = (0, 0, 0, 0, 10, 50)


@dataclass(frozen=True)
class Plan:
    """One job. ``kind``: jobs of one kind end with the same checkpoint, bit for bit. ``cancelled``: it may be cancelled."""

    number: int
    kind: str
    spec: dict[str, Any]
    cancelled: bool
    twice: bool  # two clients submit it at the same time, with one key

    @property
    def real(self) -> bool:
        return self.kind in HOOKS

    @property
    def steps(self) -> int:
        return int(self.spec["task"]["args"]["steps"]) if self.real else _STAND_INS[self.kind][0]


def stand_in(
    kind: str, name: str, notes: Path, pause: float, *, planted: str | None = None, **more: Any
) -> dict[str, Any]:
    """``notes``: the directory where each step is noted as it is done; ``pause``: seconds that one takes, of no effect on what is
    saved."""
    steps, every = _STAND_INS[kind]
    plan = {"steps": steps, "every": every, "pause": pause, "keep": True, "chain": str(notes)}
    policy = {
        "max_failures": 100_000, "backoff": 0.3, "step_deadline": STEP_DEADLINE, "startup_deadline": 60.0, "stop_grace": 6.0,
    }  # fmt: skip
    world = {"ranks_per_node": 2 if kind == "pair" else 1}
    spec = trainer_spec(
        plan, name=name, policy=policy, world=world, checkpoint={"every_steps": every, "keep_last": 2}, **more
    )
    spec["env"] |= {} if planted is None else {"PLANTED": planted}
    return spec


def real(hook: str, name: str, **more: Any) -> dict[str, Any]:
    """Two real ranks with small buckets: PowerSGD compresses from step 20 on, of 120."""
    spec = Cell(hook, "many", 2, "bytelm").spec(name)
    policy = {
        "max_failures": 100_000,
        "backoff": 0.3,
        "step_deadline": 15.0,
        "startup_deadline": 120.0,
        "stop_grace": 10.0,
    }
    return {**spec, **more, "policy": policy}


def plans(seed: int, count: int, reals: int, notes: Path, pause: float, planted: str | None = None) -> list[Plan]:
    """``reals`` of them are of real ranks, spread over the run, their hooks in turn. A function of its arguments alone."""
    source = random.Random(f"jobs {seed}")
    every = max(1, count // reals) if reals else 0
    made: list[Plan] = []
    for number in range(count):
        name, priority = f"chaos-{number}", source.choice(_PRIORITIES)
        kind = source.choices(list(_STAND_INS), (5, 3, 2))[0]
        done = sum(plan.real for plan in made)
        if every and number % every == every // 2 and done < reals:
            kind = HOOKS[done % len(HOOKS)]
            spec = real(kind, name, priority=priority)
        else:
            spec = stand_in(kind, name, notes, pause, planted=planted, priority=priority)
        made.append(Plan(number, kind, spec, cancelled=source.random() < 0.08, twice=source.random() < 0.3))
    return made


def reference(kind: str, notes: Path) -> dict[str, Any]:
    """The spec of the undisturbed job of a kind."""
    name = f"undisturbed-{kind.lower().replace('_', '-')}"
    return real(kind, name) if kind in HOOKS else stand_in(kind, name, notes, 0.005)
