"""Processes and services of one machine: process identity, the end of a private service and its agents with the ``ratchet run``
command that started them, pointers to running services."""
