"""Training data whose position can be restored: map-style data in a computed order, DataLoaders, and users' own streams."""
