"""Ratchet's hooks inside of other packages: one module each, imported by name, with the package as an extra."""
