"""A rank without torch: counts steps, obeys ``control.json``, and misbehaves as STAND_IN (JSON, by rank) says.

Keys: steps; pause (seconds per step); at (step) and do (kill, stop, raise, exit0, spin, hold-lock: wait in native code with
Python's lock held, backtrack: the same in a regular expression, mute: spin, and hear no request for stacks, own-sigusr1: spin
with a handler of that signal, oom-result, finish-but-stay);
messages (notes spooled before the first step); obey (false: stops are ignored); startup (false: the counter stays away);
child (a sleeping grandchild: "session" in a session of its own, "bare" also without any variables); after (do it only when
this file exists).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ratchet_worker.ipc import child_processes, stack_dump
from ratchet_worker.ipc.progress_counter import Stage, StepCounter

RANK = int(os.environ["RANK"])
ROOT = Path(os.environ["RATCHET_ATTEMPT_DIR"])


def finish(cause: str, code: int, step: int, message: str | None = None) -> NoReturn:
    from ratchet_contract.paths import AttemptPaths
    from ratchet_contract.phases import Cause
    from ratchet_contract.protocol.messages import RankResult
    from ratchet_worker.ipc.log_lines import now
    from ratchet_worker.ipc.result_files import write_rank_result

    result = RankResult(rank=RANK, cause=Cause(cause), at=now(), last_step=step, message=message)
    write_rank_result(AttemptPaths(ROOT).rank_result(RANK), result)
    if code < 0:
        time.sleep(3600)
    os._exit(code)


def misbehave(what: str, step: int) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "raise":
        finish("exception", 1, step, f"rank {RANK}: ValueError: wrong")
    elif what == "oom-result":
        finish("oom", 1, step, f"rank {RANK}: CUDA out of memory")
    elif what == "exit0":
        os._exit(0)
    elif what == "spin":
        while True:
            time.sleep(3600)
    elif what == "hold-lock":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # the second time is for ever, and no signal ends it
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    elif what == "backtrack":
        re.match("(a|a)*b", "a" * 60)
    elif what == "own-sigusr1":
        signal.signal(signal.SIGUSR1, lambda _number, _frame: print("the script's own", flush=True))
        print("ready for SIGUSR1", flush=True)
        misbehave("spin", step)
    elif what == "mute":
        signal.pthread_sigmask(signal.SIG_BLOCK, {stack_dump.STACKS_SIGNAL})
        misbehave("spin", step)
    elif what == "finish-but-stay":
        finish("completed", -1, step)
    else:
        raise ValueError(what)


def spool_notes(count: int) -> None:
    from ratchet_contract.paths import AttemptPaths
    from ratchet_contract.protocol.messages import Note
    from ratchet_worker.ipc.log_lines import now
    from ratchet_worker.ipc.report_spool import Spool

    spool = Spool(AttemptPaths(ROOT).spool(RANK))
    for i in range(count):
        spool.append(Note(rank=RANK, at=now(), type="test", message=f"{RANK}:{i}"))
    spool.close()


def grandchild(kind: str) -> None:
    program = [sys.executable, "-c", "import time; time.sleep(3600)", "--below", str(ROOT)]
    env = None if kind == "session" else {"PATH": os.environ["PATH"]}
    subprocess.Popen(program, start_new_session=True, env=env)


def requested_stop() -> str | None:
    try:
        wish: dict[str, Any] = json.loads((Path(os.environ["RATCHET_NODE_DIR"]) / "control.json").read_bytes())
    except (OSError, ValueError):
        return None
    return None if wish["desired"] == "run" else str(wish["cause"])


def main() -> None:
    child_processes.die_with_parent(int(os.environ["RATCHET_AGENT_PID"]))
    stack_dump.install_handlers()
    plan: dict[str, Any] = json.loads(os.environ.get("STAND_IN", "{}")).get(str(RANK), {})
    print(f"rank {RANK} starts", flush=True)
    if "child" in plan:
        grandchild(plan["child"])
    if not plan.get("startup", True):
        misbehave("spin", 0)
    counter = StepCounter.create(ROOT / "counters" / f"rank-{RANK:05d}.bin")
    if "messages" in plan:
        spool_notes(plan["messages"])
    counter.enter_stage(Stage.TRAINING)
    due = False
    for step in range(1, plan.get("steps", 10**9) + 1):
        counter.start_step(step)
        due = due or step == plan.get("at", -1)
        if due and ("after" not in plan or Path(plan["after"]).exists()):
            misbehave(plan["do"], step)
        time.sleep(plan.get("pause", 0.005))
        counter.finish_step(step)
        cause = requested_stop() if plan.get("obey", True) else None
        if cause is not None:
            finish(cause, 143, step)
    finish("completed", 0, plan.get("steps", 0))


if __name__ == "__main__":
    main()
