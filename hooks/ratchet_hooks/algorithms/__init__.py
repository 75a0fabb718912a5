"""The communication hooks."""
