"""Fixtures for all tests."""

from tests.support.databases import database, migrated, postgres_url

__all__ = ["database", "migrated", "postgres_url"]
