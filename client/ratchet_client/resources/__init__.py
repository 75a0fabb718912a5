"""The Python API of the service: ``RatchetClient`` with all its calls, ``Job``, and what they use to follow jobs and transfer
files."""
