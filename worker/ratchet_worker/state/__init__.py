"""Finds, captures, restores and compares the state of a rank's training."""
