"""A script that is all command line and YAML."""

from lightning.pytorch.cli import LightningCLI
from small import Net, Points

import ratchet.lightning  # noqa: F401

if __name__ == "__main__":
    LightningCLI(Net, Points)
