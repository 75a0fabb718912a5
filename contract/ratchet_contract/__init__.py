"""Interfaces and data formats shared by service, worker and client. No torch, no web framework, no database."""
