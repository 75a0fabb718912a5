"""The worker's part of ``ratchet doctor``: checks what this interpreter can train with. ``python -m ratchet_worker.doctor``."""
