"""The Python API of the service: ``RatchetClient`` and ``Job``, and what they use to follow jobs and transfer files."""
