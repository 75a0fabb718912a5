"""What service, worker and client agree on. No torch, no web framework, no database."""
