"""Coordination between the ranks of a job: process group, exchange, stop requests and agreement, reports."""
