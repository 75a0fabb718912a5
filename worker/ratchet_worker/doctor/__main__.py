"""``python -m ratchet_worker.doctor [probe]``, ``... compare A B``: one JSON document on standard output.

torch is imported by ``probe`` alone, and its absence is a finding.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ratchet_contract.errors import CheckpointError
from ratchet_contract.findings import CheckpointDifference


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, or 2 when a checkpoint to compare cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m ratchet_worker.doctor", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("probe", help="what this interpreter could train with (default)")
    two = commands.add_parser("compare", help="two checkpoints, bit for bit")
    two.add_argument("a", type=Path)
    two.add_argument("b", type=Path)
    options = parser.parse_args(argv)
    if options.command == "compare":
        return _compare(options.a, options.b)
    from ratchet_worker.doctor.probe import probe

    print(probe().model_dump_json())
    return 0


def _compare(a: Path, b: Path) -> int:
    from ratchet_store.compare import compare

    try:
        found = compare(a, b)
    except CheckpointError as error:
        print(f"ratchet: {error.detail}", file=sys.stderr)
        return 2
    different = [t.name for t in found.different] + [f"state of rank {s.rank} at {s.pointer}" for s in found.states]
    print(CheckpointDifference(tensors=len(found.tensors), different=different).model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
