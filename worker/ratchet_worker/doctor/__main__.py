"""``python -m ratchet_worker.doctor``: one JSON document on standard output. Where torch is missing, that is a finding."""

from __future__ import annotations

import argparse
import sys

from ratchet_worker.doctor.probe import probe


def main(argv: list[str] | None = None) -> int:
    """Print the report and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ratchet_worker.doctor", description=__doc__)
    parser.add_argument(
        "command", nargs="?", choices=["probe"], default="probe", help="what this interpreter could train with"
    )
    parser.parse_args(argv)
    print(probe().model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
