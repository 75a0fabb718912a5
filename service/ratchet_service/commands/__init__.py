"""``python -m ratchet_service``: one module per command, where the service's parts are wired together."""
