"""Opens the trackers that a service's options name."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from ratchet_service.config.settings import Settings
from ratchet_service.errors import StartError
from ratchet_service.trackers.sink import Sink


class _Kind(NamedTuple):
    """A tracker. ``option``: of ``ratchet serve``. ``package``: that it needs; a process of its own may import it. ``open``: from
    the sink's module, imported only if it is used, and the settings."""

    option: str
    package: str | None
    open: Callable[[Any, Settings], Sink]


_KINDS: Final = {
    "tensorboard": _Kind(
        "--tensorboard-dir", "tensorboard", lambda module, settings: module.TensorBoardSink(settings.tensorboard_dir)
    ),
    "mlflow": _Kind("--mlflow-uri", None, lambda module, settings: module.MlflowSink(settings.mlflow_uri)),
    "wandb": _Kind(
        "--wandb-dir", "wandb", lambda module, settings: module.WandbSink(settings.wandb_dir, settings.wandb_mode)
    ),
}


def open_sinks(settings: Settings) -> list[Sink]:
    """Return the trackers of the settings. Raise ``StartError`` if a package, or what an online run of W&B needs, is missing."""
    if settings.wandb_mode == "online":
        if settings.wandb_dir is None:
            raise StartError("--wandb-mode online: a directory for the values is not set: set --wandb-dir")
        if not os.environ.get("WANDB_API_KEY"):
            raise StartError(
                "--wandb-mode online: the variable WANDB_API_KEY of the service is not set: set it to the API key of a W&B "
                "account, or use --wandb-mode offline"
            )
    return [_open(name, settings) for name in settings.trackers]


def _open(name: str, settings: Settings) -> Sink:
    kind = _KINDS[name]
    if kind.package is not None and find_spec(kind.package) is None:
        cure = f"install it, as `pip install 'ratchet-train[{name}]'` does, or omit the option"
        raise StartError(f"{kind.option}: the package {kind.package} is not installed: {cure}")
    return kind.open(import_module(f"ratchet_service.trackers.{name}"), settings)
