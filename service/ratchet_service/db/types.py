"""Column types that behave alike on SQLite and PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """Column type of an instant. It accepts only datetimes with a time zone, and returns them in UTC."""

    impl = sa.DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> Any:
        """Return the database's type: with a time zone on PostgreSQL, without on SQLite."""
        return dialect.type_descriptor(sa.DateTime(timezone=dialect.name != "sqlite"))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a datetime to the stored form. Raises ``ValueError`` if it has no time zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a stored time must have a time zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a stored value to a datetime in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""SQLite assigns row numbers automatically to INTEGER keys only."""

MAX_NUMBER: Final = 2**63 - 1
"""The largest number that a 64-bit column can hold."""

Json = sa.JSON(none_as_null=True)


def enum_type(kind: type[StrEnum]) -> sa.Enum:
    """Return a column type that stores a ``StrEnum`` as its value in a VARCHAR(16)."""
    return sa.Enum(kind, native_enum=False, length=16, values_callable=lambda e: [m.value for m in e])
