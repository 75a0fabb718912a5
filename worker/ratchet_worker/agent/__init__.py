"""The agent: one process per node that starts, supervises and ends ranks. Imports no torch."""
