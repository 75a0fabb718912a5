"""The commands of ``python -m ratchet_service``, and ``doctor``: here the service's parts are wired together."""
