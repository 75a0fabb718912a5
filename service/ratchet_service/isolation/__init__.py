"""Isolation of jobs' processes and files from the service: users, limits, sandbox."""
