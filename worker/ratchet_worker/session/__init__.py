"""The Session for training scripts. Public import path of ``ratchet_worker.session.session``."""

from ratchet_worker.session.session import Item, Session

__all__ = [
    "Item",
    "Session",
]
