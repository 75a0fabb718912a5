"""Rounds of background work on the database, which continue after errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from ratchet_service.db.engine import first_line
from ratchet_service.db.leases import LeaseLost

log = logging.getLogger(__name__)

INTERVAL: Final = 1.0
"""Seconds between two rounds."""
ERROR_PAUSE: Final = 10.0
"""Seconds after a round with an error."""


def run_rounds(name: str, work: Callable[[], None], stopping: threading.Event) -> None:
    """Call ``work`` once per interval until ``stopping`` is set. Errors are logged under ``name``."""
    pause = INTERVAL
    while not stopping.wait(pause):
        pause = INTERVAL if log_errors(name, work) else ERROR_PAUSE


def log_errors(name: str, work: Callable[[], None]) -> bool:
    """Call ``work``, and return True unless it fails; errors are logged under ``name``. A lost lease is no failure: another
    process does the work, or its object was changed or deleted."""
    try:
        work()
    except LeaseLost:
        return True
    except SQLAlchemyError as error:
        log.warning("%s: trying again: %s", name, first_line(error))
        return False
    except Exception:
        log.exception("%s: trying again", name)
        return False
    return True
