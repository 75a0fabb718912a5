"""Tasks on real data that needs no download."""
