"""Decides how an attempt ended and what its job does next, mostly by pure functions."""
