"""A user's code as files: which are included, their digest, the archive."""
