"""HTTP: parameters in, views out. Nothing is decided here."""
