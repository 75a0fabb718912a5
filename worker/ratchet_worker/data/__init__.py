"""Training data whose position can be given back: map-style data in a computed order, and users' own streams."""
