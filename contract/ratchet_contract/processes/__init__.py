"""Processes of one machine: their identity, their end together with ``ratchet run``, and pointers to running services."""
