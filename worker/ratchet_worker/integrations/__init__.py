"""Scripts that leave the loop to another package, as jobs: one module each, imported by name."""
