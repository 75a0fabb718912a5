"""Static analysis of a user's script; no code is run."""
