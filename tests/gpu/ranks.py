"""Ranks that are killed with SIGKILL in the middle of what they do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.support.gloo_ranks import RankFailure, Ranks


class KilledRanks(Ranks):
    preload = (*Ranks.preload, "tests.gpu.hook_runs")

    def kill_during(self, function: str, *args: Any, when: Callable[[], bool]) -> None:
        """Have every rank begin ``function``, which does not return; once ``when()`` is true, SIGKILL the last rank, then the
        others. Raises ``RankFailure`` where one ends by itself."""
        for pipe in self._pipes:
            pipe.send((function, args))
        end = time.monotonic() + self.deadline
        while not when():
            for rank, pipe in enumerate(self._pipes):
                if pipe.poll():
                    raise RankFailure(f"rank {rank} was to run until it is killed: {self._receive(rank)[1]}")
            if time.monotonic() > end:
                raise RankFailure(f"nothing to kill within {self.deadline:.0f} s")
            time.sleep(0.005)
        victim = self._processes[-1]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(self.deadline)
        if victim.exitcode != -signal.SIGKILL:
            raise RankFailure(f"the killed rank ended with exit code {victim.exitcode}")
        self.close(clean=False)
