"""First bytes of the messages from an agent to its parked fork server."""

from __future__ import annotations

from typing import Final

PING: Final = b"?"
"""The server answers at once."""
FORK_AGENT: Final = b"f"
"""With the descriptors of another parked agent, which the server forks."""
SAME_CODE: Final = b"1"
"""With the plans of an attempt, and the descriptors that its ranks inherit."""
OTHER_CODE: Final = b"0"
"""As ``SAME_CODE``, of an attempt of other code than that whose packages the agent has named."""
