"""``ratchet init --patch``: the change that a script needs, as a unified diff."""
