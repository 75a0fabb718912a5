"""Integrations for scripts whose training loop is another package's: one module per package, imported by name."""
