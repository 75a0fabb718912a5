"""Checks of a spec before it is accepted, one module per part."""
