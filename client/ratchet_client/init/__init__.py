"""``ratchet init``: derives a job spec from the command line of a training script. No code of the user is imported or run."""
