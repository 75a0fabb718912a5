"""A service of one version whose agents and ranks are of another; runs under either version's packages.

``python -P version_skew_service.py HOME SLOTS``; SKEW_AGENTS is the PYTHONPATH of agents (``old_version.environ``).
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from ratchet_service.commands.serve import ServeOptions, StartError, serve
from ratchet_service.config.settings import Settings
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.launchers.registry import Launchers

if __name__ == "__main__":
    logging.basicConfig(level="INFO", stream=sys.stderr)
    settings = Settings(home=Path(sys.argv[1]))
    agent = (sys.executable, "-P", "-m", "tests.support.fake_trainer", "agent")
    launcher = LocalLauncher(
        settings.paths, agent=agent, environ=os.environ | {"PYTHONPATH": os.environ["SKEW_AGENTS"]}
    )
    try:
        serve(ServeOptions(settings, cpu_slots=int(sys.argv[2]), launchers=Launchers({"local": launcher})))
    except StartError as error:
        sys.exit(f"ratchet: {error}")
