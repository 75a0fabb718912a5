"""Writes one run of W&B, offline or online: the process that ``trackers.wandb`` starts, which asks ``_question`` there."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ratchet_contract.processes.parent_death import end_with_parent

STEP: Final = "trainer/global_step"
"""The metric of an online run that is the training step."""
_RESERVED: Final = ("", "_step", "_timestamp", "_runtime", "_wandb")
"""Names of W&B's own values; a script's values of these names get a longer name, and W&B drops an empty one."""


class _Refused(Exception):
    """The rows cannot be uploaded, or were not stored. The message is for users."""


def _read(path: Path, first: int, size: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the training step and the row of each line between the bytes ``first`` and ``size``."""
    with path.open("rb") as file:
        file.seek(first)
        while file.tell() < size:
            line = json.loads(file.readline())
            row = {f"metric {name}" if name in (*_RESERVED, STEP) else name: x for name, x in line["values"].items()}
            yield line["step"], {**row, "_timestamp": line["at"]}


def _settings(asked: dict[str, Any], **more: Any) -> Any:
    import wandb

    return wandb.Settings(
        root_dir=asked["root"], console="off",
        # of this machine and this process, which are not the job's
        disable_git=True, disable_code=True, save_code=False, x_disable_stats=True, x_disable_meta=True,
        x_disable_machine_info=True, x_save_requirements=False, host="", program="", show_info=False, **more,
    )  # fmt: skip


def _write(asked: dict[str, Any]) -> dict[str, Any]:
    """Write the offline directory. Series that came later are in the row of their step."""
    import wandb

    rows: dict[int, dict[str, Any]] = {}
    for step, values in _read(Path(asked["points"]), 0, asked["bytes"]):
        row = rows.setdefault(step, {"_timestamp": 0.0})
        row |= {**values, "_timestamp": max(row["_timestamp"], values["_timestamp"])}
    fields = {key: asked[key] for key in ("id", "name", "group", "project", "tags", "config", "notes")}
    run = wandb.init(settings=_settings(asked, mode="offline", silent=True), **fields)
    for step in sorted(rows):
        run.log(rows[step], step=step)
    run.summary.update(asked["summary"])
    directory = Path(run.dir).parent
    run.finish(exit_code=asked["exit_code"])
    return {"directory": str(directory)}


def _upload(asked: dict[str, Any]) -> dict[str, Any]:
    """Upload the rows that W&B does not have. Name, tags and config are only sent once: users may change them in W&B. Raise
    ``_Refused``."""
    import wandb

    api = wandb.Api()
    path = f"{os.environ.get('WANDB_ENTITY') or api.default_entity}/{asked['project']}/{asked['id']}"
    count = _row_count(api, path, asked["is_new"])
    names = ("id", "group", "project", "notes", *(("name", "tags", "config") if asked["is_new"] else ()))
    settings = _settings(asked, mode="online", init_timeout=60, x_update_finish_state=asked["ended"])
    run = wandb.init(settings=settings, resume="allow", **{key: asked[key] for key in names})
    # the package appends rows at the count, but drops those of steps up to the newest of history and summary
    if run.starting_step != count:
        text = f"W&B has {count} rows of it, but goes on at step {run.starting_step}: either W&B is still storing rows, or "
        raise _Refused(text + "something else writes to this run")
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    # W&B may have more than was recorded, after a kill, or less, after a loss of its own
    is_known = count >= asked["sent_rows"]
    rows = asked["sent_rows"] if is_known else 0
    for step, row in _read(Path(asked["points"]), asked["sent_bytes"] if is_known else 0, asked["bytes"]):
        if rows >= count:
            run.log({**row, STEP: step}, step=rows)
        rows += 1
    run.summary.update(asked["summary"])
    url = run.url
    run.finish(exit_code=asked["exit_code"])
    _check(api, path, rows, asked["count_seconds"])
    return {"url": url, "rows": rows}


def _row_count(api: Any, path: str, is_new: bool) -> int:
    """Return how many rows W&B has of the run. Raise ``_Refused`` if it should be new, and Ratchet has not created it: jobs have
    WANDB_RUN_ID, with which a script's own ``wandb.init`` in the same project creates a run."""
    import wandb

    try:
        run = api.run(path)
    except (ValueError, wandb.errors.CommError) as error:
        if "could not find" not in str(error).lower():
            raise
        return 0
    if is_new and "ratchet" not in run.config and (run.config or run.history_line_count):  # else it was just begun
        cure = "set another tracking.experiment, or let only one of the two log to W&B"
        raise _Refused(f"the script itself has created {path}: {cure}")
    return int(run.history_line_count or 0)


def _check(api: Any, path: str, rows: int, seconds: float) -> None:
    """Wait, for at most ``seconds``, until W&B has exactly ``rows`` rows. ``Run.finish`` returns without an error if W&B has
    refused some (``logFatalAndStopWorking`` in core/internal/filestream/filestream.go)."""
    until = time.monotonic() + seconds
    api.flush()
    run = api.run(path)
    while run.history_line_count < rows and time.monotonic() < until:
        time.sleep(1)
        run.load(force=True)
    if run.history_line_count != rows:
        raise _Refused(f"W&B has {run.history_line_count} rows of it, and not {rows}")


def main() -> None:
    asked = json.load(sys.stdin)
    end_with_parent(os.environ)
    try:
        answer = _upload(asked) if asked["online"] else _write(asked)
    except ModuleNotFoundError as error:
        answer = {"error": f"{error}: install it for the service: pip install 'ratchet-train[wandb]'"}
    except _Refused as error:
        answer = {"error": str(error), "cure": ""}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    os.write(asked["answer"], json.dumps(answer).encode())
    os._exit(0)  # the package's exit hooks would finish a refused run, and wait for its server without a limit


if __name__ == "__main__":
    main()
