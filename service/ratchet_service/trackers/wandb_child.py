"""Writes one offline directory of W&B: the process that ``trackers.wandb`` starts. Its question is in ``_request`` there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from ratchet_contract.processes.parent_death import end_with_parent
from ratchet_service.trackers.text import fitting, joined

_MAX_NOTES: Final = 8000
"""Characters of a run's notes."""
_RESERVED: Final = ("", "_step", "_timestamp", "_runtime", "_wandb")
"""Names of W&B's own values; a script's values of these names get a longer name, and W&B drops an empty one."""


def _read(path: Path, size: int) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Return the row of each step, and the notes, of the first ``size`` bytes. Series that came later are in the row of their
    step."""
    rows: dict[int, dict[str, Any]] = {}
    notes: list[str] = []
    with path.open("rb") as file:
        while file.tell() < size:
            line = json.loads(file.readline())
            if "note" in line:
                notes.append(line["note"])
                continue
            row = rows.setdefault(line["step"], {"_timestamp": line["at"]})
            row["_timestamp"] = max(row["_timestamp"], line["at"])
            row.update((f"metric {name}" if name in _RESERVED else name, x) for name, x in line["values"].items())
    return rows, notes


def _write(asked: dict[str, Any]) -> str:
    """Write the directory and return its path."""
    import wandb

    rows, notes = _read(Path(asked["points"]), asked["bytes"])
    settings = wandb.Settings(
        mode="offline", root_dir=asked["root"], silent=True, console="off",
        # of this machine and this process, which are not the job's
        disable_git=True, disable_code=True, save_code=False, x_disable_stats=True, x_disable_meta=True,
        x_disable_machine_info=True, x_save_requirements=False, host="",
    )  # fmt: skip
    run = wandb.init(
        id=asked["id"],
        name=asked["name"],
        group=asked["group"],
        project=asked["project"],
        tags=asked["tags"],
        config=asked["config"],
        notes=joined(*fitting(notes, 0, _MAX_NOTES)),
        settings=settings,
    )
    for step in sorted(rows):
        run.log(rows[step], step=step)
    run.summary.update(asked["summary"])
    directory = Path(run.dir).parent
    run.finish(exit_code=asked["exit_code"])
    return str(directory)


def main() -> None:
    asked = json.load(sys.stdin)
    end_with_parent(os.environ)
    try:
        answer = {"directory": _write(asked)}
    except ModuleNotFoundError as error:
        answer = {"error": f"{error}: install it for the service: pip install 'ratchet-train[wandb]'"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    os.write(asked["answer"], json.dumps(answer).encode())


if __name__ == "__main__":
    main()
