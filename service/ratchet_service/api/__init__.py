"""The HTTP API: authentication, bodies, idempotency, problem+json, server."""
