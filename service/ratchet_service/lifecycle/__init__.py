"""Decides how an attempt ended and what its job does next. No I/O."""
