"""Hugging Face's Accelerate as a job: ``from ratchet.accelerate import Accelerator`` instead of Accelerate's class.

See ``ratchet_worker.integrations.accelerate``.
"""

try:
    from ratchet_worker.integrations.accelerate import Accelerator
except ModuleNotFoundError as error:
    raise ImportError(
        f"ratchet.accelerate needs {error.name!r}, which is not installed here: pip install 'ratchet-train[worker,accelerate]'"
    ) from error

__all__ = ["Accelerator"]
