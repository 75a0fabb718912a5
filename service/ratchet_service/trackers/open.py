"""Opens the trackers that a service's options name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, NamedTuple

from ratchet_service.config.settings import Settings
from ratchet_service.errors import StartError
from ratchet_service.trackers.sink import Sink


class _Kind(NamedTuple):
    """A tracker. ``option``: of ``ratchet serve``; ``open``: a sink from its module, imported only now, and the settings."""

    option: str
    package: str | None
    open: Callable[[Any, Settings], Sink]


_KINDS: Final = {
    "tensorboard": _Kind(
        "--tensorboard-dir", "tensorboard", lambda module, settings: module.TensorBoardSink(settings.tensorboard_dir)
    ),
    "mlflow": _Kind("--mlflow-uri", None, lambda module, settings: module.MlflowSink(settings.mlflow_uri)),
    "wandb": _Kind(
        "--wandb", "wandb", lambda module, settings: module.WandbSink(settings.paths.home / "wandb", settings.wandb)
    ),
}


def open_sinks(settings: Settings) -> list[Sink]:
    """Return the trackers of the settings. Raise ``StartError`` if a tracker's package cannot be imported."""
    return [_open(name, settings) for name in settings.trackers]


def _open(name: str, settings: Settings) -> Sink:
    kind = _KINDS[name]
    try:
        if kind.package is not None:
            import_module(kind.package)
        return kind.open(import_module(f"ratchet_service.trackers.{name}"), settings)
    except ImportError as error:
        cure = f"install it, as `pip install 'ratchet-train[{name}]'` does, or omit the option"
        raise StartError(
            f"{kind.option}: the package {kind.package or name} cannot be imported ({error}): {cure}"
        ) from error
