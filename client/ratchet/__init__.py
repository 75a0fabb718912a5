"""Public names of Ratchet, such as the client of the service and the classes for training code. A name's module is imported when
the name is first used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ratchet_contract.script.public_names import PUBLIC

if TYPE_CHECKING:
    from ratchet_client.http.errors import AmbiguousName, DeadlineReached, ServiceFault, ServiceUnreachable
    from ratchet_client.resources.client import RatchetClient as Client
    from ratchet_client.resources.job import Job
    from ratchet_contract.api.quotas import QuotaRequest
    from ratchet_contract.api.requests import ForkRequest, PatchRequest
    from ratchet_contract.api.webhooks import WebhookChange
    from ratchet_contract.errors import Conflict, NotFound, RatchetError, Refused, SpecError, UserError
    from ratchet_contract.phases import JobPhase
    from ratchet_contract.spec.job import JobSpec
    from ratchet_worker.data.loader import TrainLoader
    from ratchet_worker.data.streams import TrainStream
    from ratchet_worker.session.session import Session
    from ratchet_worker.task import EvaluatingTask, LossResult, Parts, Sums, Task, TaskContext

    __version__: str

__all__ = [
    "AmbiguousName", "Client", "Conflict", "DeadlineReached", "EvaluatingTask", "ForkRequest", "Job", "JobPhase",
    "JobSpec", "LossResult", "NotFound", "Parts", "PatchRequest", "QuotaRequest", "RatchetError", "Refused",
    "ServiceFault", "ServiceUnreachable", "Session", "SpecError", "Sums", "Task", "TaskContext", "TrainLoader",
    "TrainStream", "UserError", "WebhookChange",
]  # fmt: skip

if not TYPE_CHECKING:  # type checkers use the imports above; with ``__getattr__`` they would accept any name

    def __getattr__(name: str) -> Any:
        """Import the module of the public name ``name`` and return the named object. Raise ``AttributeError`` for an unknown
        name, ``ImportError`` if a needed package is missing."""
        if name == "__version__":
            return import_module("ratchet_contract.version").RATCHET_VERSION
        if name not in PUBLIC:
            raise AttributeError(f"module 'ratchet' has no attribute {name!r}; it has: {', '.join(__all__)}", name=name)
        module, _, attribute = PUBLIC[name].partition(":")
        try:
            return getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            if module.startswith("ratchet_worker"):
                cure = "pip install 'ratchet-train[worker]'"
                raise ImportError(
                    f"ratchet.{name} needs {error.name!r}, which is not installed here: {cure}"
                ) from error
            raise


def __dir__() -> list[str]:
    """Return the public names. If torch is not installed, the names that are imported from ``ratchet_worker`` are left out."""
    # ``help(ratchet)`` imports each name that this returns.
    trains = find_spec("torch") is not None
    return [name for name in __all__ if trains or not PUBLIC[name].startswith("ratchet_worker")]
