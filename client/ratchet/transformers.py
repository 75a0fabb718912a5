"""Hugging Face's Trainer as a job: ``from ratchet.transformers import Trainer`` after the imports of transformers.

See ``ratchet_worker.integrations.transformers``.
"""

from __future__ import annotations

try:
    from ratchet_worker.integrations.transformers import Seq2SeqTrainer, Trainer
except ModuleNotFoundError as error:
    raise ImportError(
        f"ratchet.transformers needs {error.name!r}, which is not installed here: "
        "pip install 'ratchet-train[worker,transformers]'"
    ) from error

__all__ = ["Seq2SeqTrainer", "Trainer"]
