"""Ratchet's hooks in other packages: one module per package, imported by name, and ``rank_state``, which they share."""
