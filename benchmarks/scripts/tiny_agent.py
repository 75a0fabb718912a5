"""What the local launcher starts in the place of an agent: it hands its attempt to the process that plays all agents (``farm``),
and ends once that has taken the attempt's lock. ``python -I -S tiny_agent.py INBOX LAUNCH_FILE``, nothing of Ratchet imported."""

import os
import sys
import time


def main() -> None:
    inbox, launch = sys.argv[1:]
    attempt = os.path.dirname(launch)  # noqa: PTH120
    name = "-".join(attempt.split("/")[-3:])
    with open(os.path.join(inbox, f".{name}"), "w") as handle:  # noqa: PTH118
        handle.write(launch)
    os.rename(os.path.join(inbox, f".{name}"), os.path.join(inbox, name))  # noqa: PTH104, PTH118
    end = time.monotonic() + 60.0
    while not os.path.exists(os.path.join(attempt, "agent.json")):  # noqa: PTH110, PTH118
        if time.monotonic() > end:
            sys.exit("the farm did not take the attempt")
        time.sleep(0.05)


main()
