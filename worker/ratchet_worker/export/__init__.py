"""``python -m ratchet_worker.export``: exports checkpoints in other formats."""
