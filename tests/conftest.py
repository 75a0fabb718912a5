"""Fixtures for all tests."""

from tests.support.api import api, served
from tests.support.databases import database, migrated, postgres_url

__all__ = ["api", "database", "migrated", "postgres_url", "served"]
