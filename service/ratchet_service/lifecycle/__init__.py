"""Decides how an attempt ended and what its job does next. No I/O, except that ``unmanaged_script`` can read a script's file and
``monotonic_deadlines`` reads clocks."""
