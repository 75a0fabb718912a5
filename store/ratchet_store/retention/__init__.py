"""Retention: which checkpoints are kept, and how the others are deleted."""
