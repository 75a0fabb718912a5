"""Sends the events of jobs to webhooks: at least once, in order per job."""
