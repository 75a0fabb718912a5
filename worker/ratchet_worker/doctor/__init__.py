"""The worker's part of ``ratchet doctor``: what this interpreter could train with. Run as ``python -m ratchet_worker.doctor``."""
