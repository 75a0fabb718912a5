"""Choosing and reading what an attempt starts from."""
