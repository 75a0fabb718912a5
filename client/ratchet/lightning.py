"""Lightning's Trainer as a job: import ``SessionStrategy`` from here, and pass ``Trainer(strategy=SessionStrategy(), ...)``.

See ``ratchet_worker.integrations.lightning``.
"""

from __future__ import annotations

try:
    from ratchet_worker.integrations.lightning import SessionLogger, SessionStrategy
except ModuleNotFoundError as error:
    cure = "pip install 'ratchet-train[worker,lightning]'"
    raise ImportError(f"ratchet.lightning needs {error.name!r}, which is not installed here: {cure}") from error

__all__ = ["SessionLogger", "SessionStrategy"]
