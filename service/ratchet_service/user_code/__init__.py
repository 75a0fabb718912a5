"""Users' code and interpreters: snapshots and probes."""
