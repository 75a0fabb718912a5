"""``python -m benchmarks [--only NAME]``: run the benchmarks, each printing its own table."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Final

BENCHMARKS: Final[dict[str, str]] = {
    "checkpoint": "benchmarks.checkpoint",
    "step": "benchmarks.step",
    "hooks": "benchmarks.hooks",
    "startup": "benchmarks.startup",
    "launchers": "benchmarks.launchers",
    "paper": "benchmarks.paper",
    "network": "benchmarks.network",
    "accuracy": "benchmarks.accuracy",
    "kills": "benchmarks.kills",
    "service": "benchmarks.service",
    "queue": "benchmarks.service_queue",
    "series": "benchmarks.series",
    "ui": "benchmarks.ui",
}
"""Name on the command line -> module with ``main() -> None``, imported only when it is run."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run Ratchet's benchmarks.")
    parser.add_argument("--only", choices=sorted(BENCHMARKS), help="run just this one")
    only = parser.parse_args().only
    for name, module in BENCHMARKS.items():
        if only in (None, name):
            print(f"== {name}", flush=True)
            import_module(module).main()


if __name__ == "__main__":
    main()
