"""The real agent with stand-in ranks: ``python -P engine_agent.py LAUNCH_FILE [--node ...]``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ratchet_worker.agent import main
from tests.support.agent_with_fake_ranks import StandInStarter

main._starter = lambda launch: StandInStarter()  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(main.main())
