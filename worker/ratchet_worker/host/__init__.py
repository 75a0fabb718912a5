"""Settings of a rank's process: CPU, limits, determinism, the user's code, the exit code."""
