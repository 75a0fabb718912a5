"""Write rank files."""
