"""Agent reports: fencing, deduplication and storage."""
