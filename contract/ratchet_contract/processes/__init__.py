"""Processes of one machine: how they are found and killed, their end with ``ratchet run``, and pointers to running services."""
