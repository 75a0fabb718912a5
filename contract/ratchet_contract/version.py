"""The version of Ratchet, the number of its protocol, and names of headers. Two processes compare their protocol numbers when
they connect."""

from __future__ import annotations

from typing import Final

from ratchet_hooks import __version__

RATCHET_VERSION: Final = __version__
PROTOCOL_VERSION: Final = 1
"""Agent <-> service messages, launch.json, result.json. Both sides refuse a different number, and the service makes such an agent
save and end. What it needs for that is the same under every number: ``agent.lock``, the keys of ``agent.json``, SIGTERM,
``base.json``, the fence, the counters; the key ``protocol`` of ``launch.json`` and ``result.json``; and the manifests, which have
a separate version. Numbers before the first release are not covered: its messages have 1 again."""
PROTOCOL_HEADER: Final = "Ratchet-Protocol"
"""In every answer of the service, so that a client can detect a service of another version, and answers that are not from a
service."""
REPORT_AFTER_HEADER: Final = "Ratchet-Report-After"
"""In the answer to a report of a busy service: seconds (with a fraction) until the agent's next report, if that would contain
only figures. Agents of a version that does not know it keep their own pace."""


def not_upgraded(python: str, protocol: object) -> str:
    """Return the message of a process whose interpreter or image (``python``) was not upgraded with the service."""
    return (
        f"{python} has a Ratchet with protocol {PROTOCOL_VERSION}, the service uses "
        f"{protocol}: install the service's version of "
        "ratchet-train[worker] there (for an image: rebuild it under the same name); the job is tried again until then, and "
        "then continues from its last checkpoint"
    )
