"""A job's files in the run directory: logs, outputs, deletion."""
