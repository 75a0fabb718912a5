"""Processes and services of one machine: process identity, death of the parent, pointers to running services."""
