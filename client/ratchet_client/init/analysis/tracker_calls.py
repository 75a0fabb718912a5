"""Finds calls of experiment trackers that would write a step twice, or begin another run, when a job is restarted."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Final

from ratchet_client.init.analysis.import_origins import Origins

_WRITERS: Final = frozenset(
    {
        "torch.utils.tensorboard.SummaryWriter", "torch.utils.tensorboard.writer.SummaryWriter", "tensorboardX.SummaryWriter",
    }
)  # fmt: skip
_LOGGERS: Final = ("TensorBoardLogger", "CSVLogger")
_CLOCKS: Final = frozenset({"now", "utcnow", "today", "strftime", "time", "time_ns", "ctime", "isoformat"})
_PURGE: Final = "use session.summary_writer(), or give purge_step=session.step after the loop has begun"
_FIXED: Final = 'use a fixed name, or os.environ["RATCHET_JOB_ID"]'
_OFFLINE: Final = (
    "W&B offline makes a run of its own in each attempt, which W&B cannot join: log by session.log, and let the service export "
    "the metrics"
)


def find_doubles(
    tree: ast.Module, origins: Origins, value: Callable[[ast.expr | None], ast.expr | None]
) -> Iterator[tuple[ast.expr, str]]:
    """Yield (expression, sentence with the cure) for each place. ``value``: returns the expression that a name stands for."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    has_writer = any(origins.origins_of(node.func) & _WRITERS for node in calls)
    for node in calls:
        found, method = origins.origins_of(node.func), node.func.attr if isinstance(node.func, ast.Attribute) else ""
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        receiver = value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        of_run = isinstance(receiver, ast.Call) and "wandb.init" in origins.origins_of(receiver.func)
        if ("wandb.log" in found or (of_run and method == "log")) and "step" not in given and len(node.args) < 2:
            yield (
                node,
                "without step= W&B counts the calls, and repeated steps become further points: give step=session.step",
            )
        elif "wandb.init" in found:
            if _text(value(given.get("mode"))) == "offline":
                yield node, _OFFLINE
            if _has_time(given.get("id"), value):
                yield node, f"the id has the time in it, so that each attempt is another run: {_FIXED}"
        elif found & _WRITERS:
            if _has_time(given.get("log_dir", node.args[0] if node.args else None), value):
                yield node, f"the directory has the time in its name, so that each attempt begins another: {_FIXED}"
            elif not (node.args or "log_dir" in given):
                yield node, f"the default directory has the time in its name: {_PURGE} and a fixed directory"
            elif "purge_step" not in given:
                yield node, f"TensorBoard would show repeated steps twice: {_PURGE}"
        elif has_writer and method == "add_scalars":
            yield node, "add_scalars writes files that purge_step does not reach: use session.summary_writer()"
        elif found & {"mlflow.log_metric", "mlflow.log_metrics"}:
            name = next(iter(found)).removeprefix("mlflow.")
            yield node, f"repeated steps would be second points: use run = session.mlflow_run(), and run.{name}"
        elif "mlflow.set_experiment" in found:
            yield (
                node,
                "in a job the run exists before the script starts: name its experiment by MLFLOW_EXPERIMENT_NAME in env, too",
            )
        elif any(origin.endswith(_LOGGERS) for origin in found) and any(
            _has_time(given.get(name), value) for name in ("save_dir", "name", "version")
        ):
            yield node, f"the directory has the time in its name, so that each attempt begins another: {_FIXED}"
    yield from _offline_settings(tree)


def _offline_settings(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield the places that set the variable ``WANDB_MODE`` to "offline"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            key, mode = node.targets[0].slice, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 2:
            key, mode = node.args
        else:
            continue
        if (_text(key), _text(mode)) == ("WANDB_MODE", "offline"):
            yield mode, _OFFLINE


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _has_time(node: ast.expr | None, value: Callable[[ast.expr | None], ast.expr | None]) -> bool:
    """True if the expression, with the names in it replaced by their values, calls a clock."""
    waiting, seen = [value(node)], set[int]()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        for part in ast.walk(one):
            if isinstance(part, ast.Call):
                name = part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
                if name in _CLOCKS:
                    return True
            elif isinstance(part, ast.Name):
                waiting.append(value(part))
    return False
