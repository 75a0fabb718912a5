"""Durable file operations, and what a file system supports."""
