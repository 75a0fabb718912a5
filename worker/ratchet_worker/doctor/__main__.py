"""``python -m ratchet_worker.doctor``: one JSON document on standard output. Where torch is missing, that is a finding."""

from __future__ import annotations

import argparse
import sys

from ratchet_worker.doctor.probe import probe


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, print the probe's report as one JSON document on standard output, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m ratchet_worker.doctor", description=__doc__)
    parser.add_argument(
        "command", nargs="?", choices=["probe"], default="probe", help="what this interpreter could train with"
    )
    parser.parse_args(argv)
    print(probe().model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
