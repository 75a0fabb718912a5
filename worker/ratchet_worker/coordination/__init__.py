"""Coordination between the ranks of a job: process group, exchange, stop agreement, reports."""
