"""The real agent with one part exchanged at its seam: the starter runs stand-in ranks, which need no torch.

``python agent_with_fake_ranks.py LAUNCH_FILE TIMING (JSON) NODE``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ratchet_worker.agent.main import run
from ratchet_worker.agent.rank_handle import Timing
from ratchet_worker.agent.rank_starter import ProcessStarter, RankPlan, RankProcess

STAND_IN = Path(__file__).with_name("fake_rank.py")


class StandInStarter:
    """Starts what the agent planned, with another program."""

    def start(self, plans: Sequence[RankPlan]) -> Iterator[RankProcess]:
        return ProcessStarter().start([replace(plan, command=[plan.command[0], str(STAND_IN)]) for plan in plans])


if __name__ == "__main__":
    file, timing, node = sys.argv[1:]
    code = run(Path(file), StandInStarter(), Timing(**json.loads(timing)), node=int(node))
    assert "torch" not in sys.modules
    sys.exit(code)
