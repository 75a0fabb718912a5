"""Versions that two processes compare when they meet."""

from __future__ import annotations

from typing import Final

from ratchet_hooks import __version__

RATCHET_VERSION: Final = __version__
PROTOCOL_VERSION: Final = 1
"""Agent <-> service messages, launch.json, result.json. A different number is refused by either side, and the service has such an
agent save and end. What it needs for that is the same under every number: ``agent.lock``, the keys of ``agent.json``, SIGTERM,
``base.json``, the fence, the counters; of ``launch.json`` and ``result.json`` the key ``protocol``; and the manifests, which have
a version of their own."""
PROTOCOL_HEADER: Final = "Ratchet-Protocol"
"""In every answer of the service, so that a client knows a service of another version, and what is none."""
REPORT_AFTER_HEADER: Final = "Ratchet-Report-After"
"""In the answer to a report, where the service has much to do: seconds (with a fraction) until the agent's next one, if that has
nothing but figures to tell. Agents of a version that does not know it keep their own pace."""


def not_upgraded(python: str, protocol: object) -> str:
    """What an agent or a rank says whose interpreter or image was not upgraded with the service, which speaks ``protocol``."""
    return (
        f"{python} has a Ratchet of protocol {PROTOCOL_VERSION}, the service speaks {protocol}: install the service's version of "
        "ratchet-train[worker] there (for an image: build it anew under the same name); the job is tried again until then, and "
        "goes on by itself from its last checkpoint"
    )
