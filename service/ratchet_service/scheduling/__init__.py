"""Decides which queued job starts next, and on which slots."""
