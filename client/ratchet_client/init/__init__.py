"""``ratchet init``: from the command line of a script that trains to a job spec. Nothing of the user's is imported or run."""
