"""Contents of the report of ``ratchet doctor``: findings and installed packages."""
