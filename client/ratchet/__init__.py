"""Ratchet in Python: ``import ratchet``.

``ratchet.Client`` talks to the service; ``Session``, ``TrainLoader``, ``TrainStream`` and what a ``Task`` is made of are for
training code. Importing this costs nothing: each name's module, and torch with it, is imported when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ratchet_contract.public_names import PUBLIC

if TYPE_CHECKING:
    from ratchet_client.client import RatchetClient as Client
    from ratchet_client.errors import AmbiguousName, DeadlineReached, ServiceFault, ServiceUnreachable
    from ratchet_client.job import Job
    from ratchet_contract.api_quotas import QuotaRequest
    from ratchet_contract.api_requests import ForkRequest, PatchRequest
    from ratchet_contract.errors import Conflict, NotFound, RatchetError, Refused, SpecError, UserError
    from ratchet_contract.phases import JobPhase
    from ratchet_contract.spec import JobSpec
    from ratchet_worker.data.iterable import TrainStream
    from ratchet_worker.data.loader import TrainLoader
    from ratchet_worker.session import Session
    from ratchet_worker.task import EvaluatingTask, LossResult, Parts, Sums, Task, TaskContext

    __version__: str

__all__ = [
    "AmbiguousName", "Client", "Conflict", "DeadlineReached", "EvaluatingTask", "ForkRequest", "Job", "JobPhase",
    "JobSpec", "LossResult", "NotFound", "Parts", "PatchRequest", "QuotaRequest", "RatchetError", "Refused",
    "ServiceFault", "ServiceUnreachable", "Session", "SpecError", "Sums", "Task", "TaskContext", "TrainLoader",
    "TrainStream", "UserError",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker takes the imports above, and finds a name that is not among them

    def __getattr__(name: str) -> Any:
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
    """The names that can be imported here: ``help(ratchet)`` looks at each of them."""
    trains = find_spec("torch") is not None
    return [name for name in __all__ if trains or not PUBLIC[name].startswith("ratchet_worker")]
