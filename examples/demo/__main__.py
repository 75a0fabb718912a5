"""``python -m examples.demo [DIRECTORY]``: exit status 0 only when everything happened as told and all bits are equal."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from examples.demo import report
from examples.demo.processes import DemoError, Service
from examples.demo.story import Story, say
from ratchet_contract.errors import RatchetError

INTRODUCTION = """\
Ratchet runs training jobs that may be killed at any instant, and brings each back as if nothing had happened.
This demo trains a small network on handwritten digits with two processes (ranks) that exchange compressed gradients
(PowerSGD). The compression keeps a memory of what it left out: lose it, and the weights go another way.
One run gets killed, preempted, and loses its service. A second run is left alone. Then all bits are compared."""


PICTURE, REPORT = "loss.svg", "report.html"
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(directory: Path) -> int:
    """Run the demo; picture and report stay in ``directory``, the run directory below it is removed unless something failed."""
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="run-", dir=directory)).resolve()
    service = Service(home, "--standby", "on")
    story = Story(service)
    try:
        _tell(story, directory)
    except (DemoError, RatchetError) as error:
        story.faults.append(str(error))
    except KeyboardInterrupt:
        story.faults.append("ended by a signal")
    finally:
        for ending in _ENDINGS:
            signal.signal(ending, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        service.stop()
    say(f"\nAll processes of the demo have ended. It took {time.monotonic() - began:.0f} s.")
    if story.faults:
        say(
            "FAILED:\n"
            + "\n".join(f"  - {fault}" for fault in story.faults)
            + f"\nLogs and checkpoints are kept: {home}"
        )
        return 1
    shutil.rmtree(home)
    say(f"IDENTICAL. The loss of both runs, with the interruptions: {directory / PICTURE}")
    say(f"The interrupted job's page with its data, for a browser: {directory / REPORT}")
    return 0


def _tell(story: Story, directory: Path) -> None:
    say(INTRODUCTION)
    say("\n1. Start the service (SQLite, a free port) and submit the job.")
    say(f"  the service answers at {story.service.start()}")
    interrupted = story.interrupted()
    say("\n5. The same job again, undisturbed.")
    undisturbed = story.undisturbed()
    say("\n6. The communication hook of the interrupted job, as GET /v1/jobs/{id}/hook tells it:")
    report.hook(story.service.client, interrupted)
    say("\n7. The attempts of both jobs:")
    report.attempts(story, interrupted, undisturbed)
    say("\n8. The two final checkpoints: model, optimizer, buffers, generators, and each rank's hook memory.")
    report.comparison(story, interrupted, undisturbed)
    report.accuracy(story, interrupted, undisturbed)
    report.draw(story, interrupted, undisturbed, directory / PICTURE)
    story.service.client.report(interrupted.id, directory / REPORT, force=True)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    for ending in _ENDINGS:
        signal.signal(ending, _terminate)
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".ratchet-demo")))
