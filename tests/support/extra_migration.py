"""A revision after the newest one, for tests of migrations."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from alembic.config import Config

from ratchet_service.db import migrate

REVISION = "later"
_SCRIPT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "later", "{head}", None, None


def upgrade() -> None:
    for table in ("attempts", "jobs"):
        op.add_column(table, sa.Column("added_later", sa.String(16), nullable=True))


def downgrade() -> None:
    for table in ("jobs", "attempts"):
        op.drop_column(table, "added_later")
"""


def add_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let this process know of ``REVISION``, which adds a column to ``attempts`` and one to ``jobs``. Returns the revision before
    it. Ends with the test."""
    before = migrate.head_revision()
    location = migrate.script_config().get_main_option("script_location")
    assert location is not None
    shutil.copytree(location, folder / "migrations")
    (folder / "migrations" / "versions" / "later.py").write_text(_SCRIPT.format(head=before))
    scripts = migrate.script_config

    def with_it() -> Config:
        settings = scripts()
        settings.set_main_option("script_location", str(folder / "migrations"))
        return settings

    monkeypatch.setattr(migrate, "script_config", with_it)
    for name in ("head_revision", "known_revisions"):
        monkeypatch.setattr(migrate, name, getattr(migrate, name).__wrapped__)
    return before
