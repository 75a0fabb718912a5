"""``ratchet init``: derives a job spec from a training script's command line. No code of the user is run."""
