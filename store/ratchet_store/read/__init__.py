"""Read, verify and compare checkpoints."""
