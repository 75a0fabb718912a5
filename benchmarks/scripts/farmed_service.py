"""A service, API and reconciler, whose local launcher starts ``tiny_agent`` in the place of agents.

``python -m benchmarks.scripts.farmed_service HOME INBOX SLOTS [DATABASE_URL]``
"""

from __future__ import annotations

import logging
import sys
from ipaddress import ip_network
from pathlib import Path

from ratchet_contract.paths import HomePaths
from ratchet_service.commands.serve import ServeOptions, serve
from ratchet_service.config.settings import Settings
from ratchet_service.launchers.local.launcher import LocalLauncher
from ratchet_service.launchers.registry import Launchers


def main() -> None:
    home, inbox, slots, *url = sys.argv[1:]
    logging.basicConfig(level="WARNING", stream=sys.stderr)
    agent = (sys.executable, "-I", "-S", str(Path(__file__).with_name("tiny_agent.py")), inbox)
    settings = Settings(
        home=Path(home),
        database_url=url[0] if url else None,
        request_rate=1e6,
        webhook_networks=(ip_network("127.0.0.0/8"),),
    )
    launcher = LocalLauncher(HomePaths(settings.home), agent=agent)
    serve(ServeOptions(settings, cpu_slots=int(slots), launchers=Launchers({"local": launcher})))


if __name__ == "__main__":
    main()
