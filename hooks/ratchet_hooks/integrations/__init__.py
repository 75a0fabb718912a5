"""Ratchet's hooks in other packages: one module per package, imported by name, with the package as an extra."""
