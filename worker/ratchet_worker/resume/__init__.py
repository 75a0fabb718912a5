"""Choosing and reading the checkpoint that an attempt starts from."""
