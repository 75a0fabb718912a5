"""Managed DDP: attach a hook to a model, capture, restore and convert its state."""
