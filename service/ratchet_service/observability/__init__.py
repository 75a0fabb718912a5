"""The service's own health, metrics and logs."""
