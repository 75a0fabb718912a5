"""Files and shared memory between an agent and its ranks."""
