"""Saving a checkpoint: schedule, capture, copy, write, commit."""
