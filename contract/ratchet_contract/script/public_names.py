"""The public names of ``ratchet``, with the modules from which they are imported."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ratchet_contract.version import RATCHET_VERSION

PACKAGE: Final = "ratchet"
PUBLIC: Final[Mapping[str, str]] = MappingProxyType(
    {
        "AmbiguousName": "ratchet_client.errors:AmbiguousName",
        "Client": "ratchet_client.client:RatchetClient",
        "Conflict": "ratchet_contract.errors:Conflict",
        "DeadlineReached": "ratchet_client.errors:DeadlineReached",
        "EvaluatingTask": "ratchet_worker.task:EvaluatingTask",
        "ForkRequest": "ratchet_contract.api.requests:ForkRequest",
        "Job": "ratchet_client.job:Job",
        "JobPhase": "ratchet_contract.phases:JobPhase",
        "JobSpec": "ratchet_contract.spec:JobSpec",
        "LossResult": "ratchet_worker.task:LossResult",
        "NotFound": "ratchet_contract.errors:NotFound",
        "Parts": "ratchet_worker.task:Parts",
        "PatchRequest": "ratchet_contract.api.requests:PatchRequest",
        "QuotaRequest": "ratchet_contract.api.quotas:QuotaRequest",
        "RatchetError": "ratchet_contract.errors:RatchetError",
        "Refused": "ratchet_contract.errors:Refused",
        "ServiceFault": "ratchet_client.errors:ServiceFault",
        "ServiceUnreachable": "ratchet_client.errors:ServiceUnreachable",
        "Session": "ratchet_worker.session:Session",
        "SpecError": "ratchet_contract.errors:SpecError",
        "Sums": "ratchet_worker.task:Sums",
        "Task": "ratchet_worker.task:Task",
        "TaskContext": "ratchet_worker.task:TaskContext",
        "TrainLoader": "ratchet_worker.data.loader:TrainLoader",
        "TrainStream": "ratchet_worker.data.iterable:TrainStream",
        "UserError": "ratchet_contract.errors:UserError",
        "WebhookChange": "ratchet_contract.api.webhooks:WebhookChange",
    }
)


def requirement(module: str) -> str:
    """Return the requirement that pip needs to install the top-level module ``module``. For any module but ``ratchet``, this is
    the module's own name, which is only a guess."""
    return f"ratchet-train[worker]=={RATCHET_VERSION}" if module == PACKAGE else module


def shadow_advice(error: BaseException, file: str | None) -> str | None:
    """Return advice if ``error`` shows that ``import ratchet`` has found another module than Ratchet's own package, such as a
    ``ratchet.py`` of the user. Return None for other errors. ``file``: the file of the module that was found, if known."""
    if isinstance(error, AttributeError):
        package, missing = getattr(error.obj, "__name__", None), error.name
    elif isinstance(error, ImportError):
        package, missing = error.name, str(error).partition("'")[2].partition("'")[0]  # cannot import name 'X' from ...
    else:
        return None
    if package != PACKAGE or missing is None or missing not in PUBLIC:
        return None
    module = PUBLIC[missing].partition(":")[0]
    return (
        f"{PACKAGE}.{missing} does not exist, since `import {PACKAGE}` found {file or 'another module'} instead of Ratchet's "
        "package: "
        f"rename it (and the directory, if it is one), or write `from {module} import {PUBLIC[missing].partition(':')[2]}`"
    )
